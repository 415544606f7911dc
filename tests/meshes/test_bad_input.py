"""Rubbish on every port, in every model file and on the command line: one clear answer, and the mesh goes on."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import psutil
import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.wire.proto import control_pb2
from exo_mesh.wire.ring_link import FRAMES_METHOD
from tests.cli.closed_port import closed_port
from tests.support.checkpoints import TinyModel, tensor_shapes, write_checkpoint, write_safetensors
from tests.support.peers import TRACES, Peer, await_all, mesh, text_of
from tests.support.processes import QUIET_FLAGS, eventually, run

Reply = tuple[int, dict[str, Any]]

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
OPENINGS = (
    b"",
    HTTP2,
    HTTP2 + b"\0\0\0\4\0\0\0\0\0",  # and an empty SETTINGS frame
    b"GET / HTTP/1.1\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\n",
)
ROUNDS = 30
SIZES = (0, 1, 9, 100, 3000, 70_000)
MAX_LOG_LINES = 100
MAX_GROWTH_BYTES = 48 * 2**20


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model that can be used, and one for each way in which a model can be broken."""
    root = tmp_path_factory.mktemp("models")
    write_checkpoint(root / "fine", TinyModel())
    for name, (breaker, _) in BROKEN.items():
        breaker(write_checkpoint(root / name, TinyModel()))
    return root


@pytest.fixture(scope="module")
def udp_port() -> int:
    return closed_port()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, udp_port: int) -> Iterator[list[Peer]]:
    """Two peers that find each other by UDP as well, with the demo model over both; the first has the other models."""
    port = str(udp_port)
    flags = ["--discovery", "udp", "--listen-port", port, "--broadcast-port", port]
    with mesh(tmp_path_factory.mktemp("two"), [[*flags, "--models-dir", str(models_dir)], flags]) as peers:
        peers[0].place(min_peers=2)
        yield peers


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def still_answers(peers: list[Peer], before: list[dict[str, Any]]) -> None:
    """The mesh answers as ever, with the same runners."""
    for peer in peers:
        assert peer.child.alive, peer.child.log_tail(30)
        assert text_of(peer.chat("Count from 7 to 12.")) == "7, 8, 9, 10, 11, 12"
        assert [stage["pid"] for stage in peer.instances()[0]["stages"]] == [stage["pid"] for stage in before]
    await_all(peers, Peer.idle)


@contextlib.contextmanager
def unharmed(peers: list[Peer]) -> Iterator[None]:
    """What happens inside leaves no trace: no process dies, memory and log hardly grow, and the mesh answers."""
    stages = peers[0].instances()[0]["stages"]
    still_answers(peers, stages)
    lines = [len(peer.log.splitlines()) for peer in peers]
    sizes = [psutil.Process(peer.child.pid).memory_info().rss for peer in peers]
    yield
    still_answers(peers, stages)
    for peer, size, num_lines in zip(peers, sizes, lines, strict=True):
        assert psutil.Process(peer.child.pid).memory_info().rss - size < MAX_GROWTH_BYTES
        new = peer.log.splitlines()[num_lines:]
        assert len(new) < MAX_LOG_LINES, new[-20:]
        assert not [line for line in new if any(trace in line for trace in TRACES) or '"error"' in line], new


@pytest.mark.extended
def test_random_bytes_on_every_tcp_port(two: list[Peer]) -> None:
    stages = two[0].instances()[0]["stages"]
    ports = [port_of(peer.url) for peer in two] + [port_of(peer.grpc_address) for peer in two]
    ports += [port_of(stage["endpoint"]) for stage in stages]
    assert len(set(ports)) == 6
    rng = random.Random(2)
    with unharmed(two), contextlib.ExitStack() as open_to_the_end:
        for index in range(ROUNDS):
            for port in ports:
                sock = socket.create_connection(("127.0.0.1", port), timeout=5)
                if index % 10:
                    with sock:
                        throw(sock, rng)
                else:  # some never hang up
                    open_to_the_end.enter_context(sock)
                    throw(sock, rng)


def throw(sock: socket.socket, rng: random.Random) -> None:
    with contextlib.suppress(OSError):  # it may hang up in the middle
        sock.sendall(rng.choice(OPENINGS) + rng.randbytes(rng.choice(SIZES)))
        if rng.random() < 0.3:
            sock.shutdown(socket.SHUT_WR)


def test_random_messages_to_every_grpc_method(two: list[Peer]) -> None:
    """Well-formed HTTP/2 and gRPC this time, so that the bytes reach our own code."""
    service = control_pb2.DESCRIPTOR.services_by_name["Control"]
    control = [f"/{service.full_name}/{method.name}" for method in service.methods]
    runner = ["/exo_mesh.Driver/Generate", FRAMES_METHOD]
    targets = [(peer.grpc_address, control) for peer in two]
    targets += [(stage["endpoint"], runner) for stage in two[0].instances()[0]["stages"]]
    rng, code = random.Random(3), grpc.StatusCode
    with unharmed(two):
        outcomes: set[grpc.StatusCode] = set()
        for address, methods in targets:
            with grpc.insecure_channel(address) as channel:
                for method in methods:
                    outcomes |= {call(channel, method, rng) for _ in range(8)}
        assert {code.OK, code.FAILED_PRECONDITION, code.INVALID_ARGUMENT} <= outcomes, "reached no code"
        assert code.UNKNOWN not in outcomes, "malformed protobuf is an invalid argument"
        assert not outcomes & {code.UNAVAILABLE, code.DEADLINE_EXCEEDED, code.CANCELLED}


def call(channel: grpc.Channel, method: str, rng: random.Random) -> grpc.StatusCode:
    """Send one to three random messages; how the call ended."""
    messages = [rng.randbytes(rng.choice((0, 1, 2, 20, 3000))) for _ in range(rng.randint(1, 3))]
    answers = channel.stream_stream(method)(iter(messages), timeout=10)
    try:
        list(answers)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
        return code
    return grpc.StatusCode.OK


@pytest.mark.extended
def test_random_datagrams_to_discovery(two: list[Peer], udp_port: int) -> None:
    rng = random.Random(4)
    own = {"mesh": "exo-mesh", "v": 1, "ns": "default", "id": "stranger", "port": 9}
    odd = [None, 0, -1, 9, 65_536, "9", [], {}, "x" * 900, two[0].id]
    with unharmed(two), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        for _ in range(300):
            sock.sendto(rng.randbytes(rng.choice((0, 1, 30, 1024, 1400))), ("127.255.255.255", udp_port))
            almost = {**own, rng.choice(list(own)): rng.choice(odd)}
            sock.sendto(json.dumps(almost).encode(), ("127.255.255.255", udp_port))
    assert all(len(peer.state()["view"]["peers"]) == 2 for peer in two)


HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "request_text",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"HELLO\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        f"{HEAD}Content-Length: -1\r\n\r\n".encode(),
        f"{HEAD}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
        f"{HEAD}X-Long: {'x' * 100_000}\r\n\r\n".encode(),
        f"GET /{'x' * 100_000} HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        HEAD.encode() + b"".join(b"X-%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
    ],
    ids=["tls", "words", "version", "negative length", "bad chunk", "long header", "long path", "many headers"],
)
def test_what_is_not_http_gets_a_400(two: list[Peer], request_text: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port_of(two[0].url)), timeout=10) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(request_text)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while b"\r\n" not in answer and (chunk := sock.recv(4096)):
                answer += chunk
    assert answer.startswith(b"HTTP/1."), answer
    assert 400 <= int(answer.split()[1]) < 500, answer


def test_a_request_cut_short_leaves_nothing(two: list[Peer]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Count from 7 to 12."}]})
    for stop in (10, len(HEAD), -30):
        with socket.create_connection(("127.0.0.1", port_of(two[0].url)), timeout=10) as sock:
            sock.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()[:stop])
    await_all(two, Peer.idle)


def post(peer: Peer, path: str, body: bytes | Any, content_type: str = "application/json") -> Reply:
    address = urlsplit(peer.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"Content-Type": content_type, **peer.api.credentials()})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


DEEP = 100_000
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "half": b'{"messages": [{"role": "user"',
    "not utf-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "deep list": b"[" * DEEP,
    "deep field": b'{"messages": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep but allowed": b'{"messages": [], "response_format": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "null": b"null",
    "nan": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "huge number": b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    "huge integer": b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 4000 + b"}",
    "twice": b'{"messages": 1, "messages": 2}',
    "random": random.Random(5).randbytes(2000),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_bad_body_gets_a_400(two: list[Peer], body: bytes) -> None:
    for content_type in ("application/json", "text/plain", "multipart/form-data; boundary=x", "x" * 200):
        status, answer = post(two[1], "/v1/chat/completions", body, content_type)
        assert (status, answer["error"]["code"]) == (400, "invalid_request"), answer
        assert 0 < len(answer["error"]["message"]) < 500
    assert post(two[1], "/instance", body)[0] == 400


def test_a_body_too_large_gets_a_413(two: list[Peer]) -> None:
    status, answer = post(two[0], "/v1/chat/completions", b" " * (17 << 20))
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def cut(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])


def with_shapes(model: Path, change: Callable[[dict[str, tuple[int, ...]]], Any]) -> None:
    """The weights anew, with other tensors."""
    import numpy as np

    shapes = tensor_shapes(TinyModel())
    change(shapes)
    write_safetensors(model / "model.safetensors", shapes, "float32", lambda name: np.zeros(shapes[name], np.float32))


UP = "model.layers.3.mlp.up_proj.weight"
Breaker = Callable[[Path], Any]
BROKEN: dict[str, tuple[Breaker, tuple[str, ...]]] = {
    # name of the model: (what breaks it, words that the error must have)
    "cut-tensor": (lambda m: cut(m / "model.safetensors", -1000), ("model.safetensors", "lm_head.weight", "cut short")),
    "cut-header": (lambda m: cut(m / "model.safetensors", 100), ("model.safetensors", "cut short")),
    "empty-weights": (lambda m: cut(m / "model.safetensors", 0), ("model.safetensors", "0 bytes")),
    "no-weights": (lambda m: (m / "model.safetensors").unlink(), ("no-weights", "model.safetensors")),
    "no-tokenizer": (lambda m: (m / "tokenizer.json").unlink(), ("no-tokenizer", "tokenizer.json")),
    "cut-config": (lambda m: cut(m / "config.json", 40), ("config.json", "not valid JSON")),
    "list-config": (lambda m: (m / "config.json").write_text("[]"), ("config.json", "not a JSON object")),
    "no-layers": (lambda m: edit(m / "config.json", lambda c: c.pop("num_hidden_layers")), ("config.json", "layers")),
    "new-kind": (lambda m: edit(m / "config.json", lambda c: c.update(model_type="frobnicate")), ("frobnicate",)),
    "lost-tensor": (lambda m: with_shapes(m, lambda shapes: shapes.pop(UP)), ("model.safetensors", UP)),
    "odd-shape": (lambda m: with_shapes(m, lambda s: s.update({UP: (128, 32)})), ("model.safetensors", UP)),
}
QUESTIONS_ONLY = ("cut-vocabulary", "bad-template", "odd-shape")
PLACING_ONLY = ("lost-tensor",)
"""Where only requests look at what is broken; and where a runner has to start to see it, which takes seconds."""
BROKEN |= {
    "cut-vocabulary": (lambda m: cut(m / "tokenizer.json", 40), ("tokenizer.json",)),
    "bad-template": (
        lambda m: edit(m / "tokenizer_config.json", lambda c: c.update(chat_template="{% for x %}")),
        ("tokenizer_config.json", "chat template"),
    ),
}


SECONDS = ("new-kind", "lost-tensor", "odd-shape")
"""Where a process has to import an engine to see what is broken."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended if name in SECONDS else ()) for name in BROKEN]
)
def test_a_broken_model_gets_one_clear_error(two: list[Peer], models_dir: Path, name: str) -> None:
    """It names the file, and no path of the server."""
    question = {"model": name, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
    paths: list[tuple[str, Any]] = [("/v1/chat/completions", question), ("/instance", {"model": name})]
    if name in QUESTIONS_ONLY:
        paths.pop()
    if name in PLACING_ONLY:
        paths.pop(0)
    for path, body in paths:
        began = time.monotonic()
        status, answer = post(two[0], path, body)
        assert time.monotonic() - began < 20
        assert (status, answer["error"]["code"]) == (400, "model_unusable"), answer
        message = answer["error"]["message"]
        assert not [word for word in BROKEN[name][1] if word not in message], message
        assert len(message.splitlines()) == 1 and len(message) < 600
        assert str(models_dir) not in message, message

    def told_of() -> list[Any]:
        return [instance for peer in two for instance in peer.instances() if instance["model"] == name]

    assert eventually(lambda: not told_of()), told_of()
    assert eventually(lambda: len(two[0].runners()) == 1), "a runner of a broken model is left"


@pytest.mark.extended
def test_a_good_model_beside_broken_ones_works(two: list[Peer]) -> None:
    """Also through the peer that has to fetch the text files, and has fetched those of a model of equal weights."""
    body = {"model": "fine", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4, "temperature": 0}
    status, answer = post(two[1], "/v1/chat/completions", {**body, "model": "bad-template"})
    assert (status, answer["error"]["code"]) == (400, "model_unusable"), answer
    replies = [post(peer, "/v1/chat/completions", body) for peer in two]
    assert [status for status, _ in replies] == [200, 200], replies
    assert text_of(replies[0][1]) == text_of(replies[1][1])
    listed = {entry["id"] for entry in two[0].api.get("/v1/models")["data"]}
    assert "fine" in listed and not {"cut-tensor", "no-tokenizer", "cut-config"} & listed
    assert two[0].api.delete("/instance/fine-1", 15)["deleted"]


def test_a_model_that_breaks_while_the_node_runs(two: list[Peer], models_dir: Path) -> None:
    model = shutil.copytree(models_dir / "fine", models_dir / "breaking")
    body = {"model": "breaking", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
    assert two[0].api.get("/v1/models/breaking")["id"] == "breaking"
    cut(model / "model.safetensors", -1)
    status, answer = post(two[0], "/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (400, "model_unusable"), answer


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--grpc-port", "99999"], exit_codes.USAGE, "--grpc-port 99999"),
        (["--grpc-port", "many"], exit_codes.USAGE, "--grpc-port many"),
        (["--api-port", "-1"], exit_codes.USAGE, "--api-port -1"),
        pytest.param(["--engine", "nope"], exit_codes.USAGE, "--engine nope", marks=pytest.mark.extended),
        (["--frobnicate"], exit_codes.USAGE, "--frobnicate"),
        (["--max-memory", "lots"], exit_codes.USAGE, "--max-memory lots"),
        pytest.param(["--host", "203.0.113.1"], exit_codes.USAGE, "--host 203.0.113.1", marks=pytest.mark.extended),
    ],
)
def test_what_cannot_be_served_is_one_line_and_an_exit_code(
    flags: list[str], code: int, message: str, tmp_path: Path
) -> None:
    refused = run(["serve", *QUIET_FLAGS, "--api-port", "0", *flags], tmp_path)
    assert (refused.returncode, refused.stdout) == (code, "")
    assert refused.stderr.startswith("exo-mesh: ") and refused.stderr.count("\n") == 1, refused.stderr
    assert message in refused.stderr


@pytest.mark.extended
def test_a_taken_api_port_is_exit_code_4(two: list[Peer], tmp_path: Path) -> None:
    port = str(port_of(two[0].url))
    refused = run(["serve", *QUIET_FLAGS, "--api-port", port], tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (exit_codes.ADDRESS_IN_USE, 1), refused.stderr
    assert port in refused.stderr and "--api-port" in refused.stderr


@pytest.mark.extended
def test_no_free_grpc_port_is_one_line(tmp_path: Path) -> None:
    """The last port of all is taken, so there is no next one to try."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 65_535))
        other.listen()
        refused = run(["serve", *QUIET_FLAGS, "--api-port", "0", "--grpc-port", "65535"], tmp_path)
    assert (refused.returncode, refused.stdout) == (exit_codes.FAILED, "")
    assert refused.stderr.startswith("exo-mesh: no free port for the control endpoint"), refused.stderr
    assert refused.stderr.count("\n") == 1
