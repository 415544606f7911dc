"""What a file server sends to peers, and what it keeps for itself."""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from exo_mesh.models.file_server.messages import PRESENT_HEADER, WAIT_HEADER, path_of
from exo_mesh.models.file_server.tls import client_context
from exo_mesh.security.credentials import MESH_DNS_NAME, Credentials, RenewedCredentials
from exo_mesh.security.secret import new_secret
from tests.security.strangers import of_another_mesh, self_signed
from tests.support.file_servers import (
    DEADLINE_S,
    DIGEST,
    NAME,
    WEIGHTS,
    Arriving,
    credentials_of,
    serving,
    wait_until,
)

SECRET = new_secret()


def test_a_listing_has_every_file_of_the_model_and_nothing_else(tmp_path: Path) -> None:
    with serving(tmp_path / "m") as served:
        for name in (".env", "README.md", "notes.pickle", "notes", "vocab.txt", "LICENSE", "LICENSE.md"):
            (tmp_path / "m" / name).write_text("x")
        status, headers, body = served.get(path_of(NAME))
        listing = json.loads(body)
        assert status == 200 and headers["ETag"] == f'"{DIGEST}"' and listing["digest"] == DIGEST
        texts = {"config.json", "model.safetensors.index.json", "vocab.txt", "LICENSE", "LICENSE.md"}
        assert set(listing["files"]) == {WEIGHTS, *texts}
        size = len(served.content)
        assert listing["files"][WEIGHTS] == {"size": size, "sha256": "", "git_id": "", "pieces": []}
        for name in (".env", "README.md", "notes.pickle", "notes"):
            assert served.get(path_of(NAME, name))[0] == 404


def test_a_model_in_a_cache_of_the_hub_says_where_it_is_from(tmp_path: Path) -> None:
    model_dir = tmp_path / "models--org--tiny" / "snapshots" / ("c" * 40)
    blob = tmp_path / "models--org--tiny" / "blobs" / ("a" * 64)
    blob.parent.mkdir(parents=True)
    model_dir.mkdir(parents=True)
    blob.write_bytes(b"weights")
    (model_dir / WEIGHTS).symlink_to(os.path.relpath(blob, model_dir))
    with serving(model_dir) as served:
        listing = json.loads(served.get(path_of(NAME))[2])
        assert (listing["repo"], listing["revision"]) == ("org/tiny", "c" * 40)
        assert listing["files"][WEIGHTS] == {"size": 7, "sha256": "a" * 64, "git_id": "", "pieces": []}
        assert served.get(path_of(NAME, WEIGHTS))[2] == b"weights"


def test_ranges_and_whole_files_are_sent_exactly(tmp_path: Path) -> None:
    with serving(tmp_path / "m") as served:
        size = len(served.content)
        assert served.get(path_of(NAME, WEIGHTS))[::2] == (200, served.content)
        status, headers, body = served.range(7, 70_000)
        assert (status, headers["Content-Range"], body) == (206, f"bytes 7-69999/{size}", served.content[7:70_000])
        assert served.range(size - 3, size + 50)[::2] == (206, served.content[-3:])
        assert served.get(path_of(NAME, WEIGHTS), {"Range": "bytes=99990-"})[::2] == (206, served.content[99_990:])
        assert served.range(size, size + 1)[0] == 416


def test_another_version_of_the_model_is_not_sent(tmp_path: Path) -> None:
    with serving(tmp_path / "m") as served:
        assert served.range(0, 9, If_Match=f'"{DIGEST}"')[0] == 206
        assert served.range(0, 9, If_Match='"other"')[0] == 412
        assert served.get(path_of(NAME), {"If-Match": '"other"'})[0] == 412


def test_no_path_leads_out_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("secret")
    with serving(tmp_path / "models" / "m") as served:
        (served.model_dir / "out.json").symlink_to(tmp_path / "secret.json")
        (served.model_dir / "dir.json").mkdir()
        os.mkfifo(served.model_dir / "pipe.json")
        (served.model_dir / "lost.json").symlink_to("nowhere.json")
        quoted = path_of(NAME)
        files = ["..", "../secret.json", "..%2f..%2fsecret.json", "%2e%2e/secret.json", "out.json", "dir.json",
                 "pipe.json", "lost.json", f"..%2fm%2f{WEIGHTS}", "config.json%00", "%ff", "config.json/", "",
                 "exo-mesh.files", "%2fetc%2fpasswd", "config.json?x"]  # fmt: skip
        paths = [f"{quoted}/{file}" for file in files]
        paths += ["/", "/models", "/models/", "/models/..", "/models/%2e%2e/secret.json", "/etc/passwd", "*",
                  f"//{quoted}", f"/models/{NAME}", "http://127.0.0.1/models"]  # fmt: skip
        answers = {path: served.get(path)[::2] for path in paths}
        assert {path: status for path, (status, _) in answers.items()} == dict.fromkeys(paths, 404)
        assert not any(b"secret" in body for _, body in answers.values())
        assert json.loads(served.get(quoted)[2])["files"].keys() == {
            WEIGHTS, "config.json", "model.safetensors.index.json",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /models/a HTTP/1.1\r\n\r\n", 405),
        (b"HEAD /models/a HTTP/1.1\r\n\r\n", 405),
        (b"GET /models/a\r\n\r\n", 400),
        (b"GET /models/a HTTP/2\r\n\r\n", 400),
        (b"GET /models/a HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET /models/a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /models/a HTTP/1.1\r\nRange: bytes=0-1,4-5\r\n\r\n", 400),
        (b"GET /models/a HTTP/1.1\r\nRange: bytes=-5\r\n\r\n", 400),
        (b"GET /models/a HTTP/1.1\r\nRange: bytes=5-4\r\n\r\n", 400),
        (b"GET /models/a HTTP/1.1\r\nRange: bytes=0-1\r\nrange: bytes=0-2\r\n\r\n", 400),
        (b"GET /models/a HTTP/1.1\r\nExo-Wait-S: nan\r\n\r\n", 400),
        (b"GET /models/a HTTP/1.1\r\n nonsense\r\n\r\n", 400),
        (b"GET /models/a HTTP/1.1\r\n\r\n", 404),
    ],
)
def test_what_is_no_request_of_a_peer_is_refused(tmp_path: Path, request_: bytes, status: int) -> None:
    with serving(tmp_path / "m") as served, socket.create_connection(("127.0.0.1", served.port), DEADLINE_S) as sock:
        sock.sendall(request_)
        assert sock.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_head_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    with ExitStack() as stack:
        served = stack.enter_context(serving(tmp_path / "m"))
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), DEADLINE_S))
        stack.enter_context(pytest.raises(ConnectionError))
        for _ in range(10_000):
            sock.sendall(b"x" * 1000)


def test_of_a_file_that_is_not_whole_only_what_is_there_is_sent(tmp_path: Path) -> None:
    content = bytes(range(250)) * 40
    parts = Arriving(tmp_path / "m", content)
    parts.bring((100, 200), (300, 1000))
    with serving(tmp_path / "m") as served:
        listing = json.loads(served.get(path_of(NAME))[2])
        assert {WEIGHTS, "config.json"} <= listing["files"].keys()
        assert (listing["repo"], listing["revision"]) == ("org/tiny", "r" * 40)
        status, headers, body = served.range(150, 400)
        assert (status, headers["Content-Range"], body) == (206, "bytes 150-199/10000", content[150:200])
        for start in (0, 99, 200, 299, 1000, 9999):
            status, headers, _ = served.range(start, start + 10)
            assert (status, headers["Content-Range"], headers[PRESENT_HEADER]) == (416, "bytes */10000", "800")
        assert served.get(path_of(NAME, WEIGHTS))[0] == 416
        assert served.get(path_of(NAME, f"{WEIGHTS}.part"))[0] == 404
        parts.bring((0, 10_000))
        assert served.get(path_of(NAME, WEIGHTS))[::2] == (200, content)


def test_bytes_that_arrive_are_sent_as_they_come(tmp_path: Path) -> None:
    content = bytes(range(250)) * 40
    parts = Arriving(tmp_path / "m", content)
    with serving(tmp_path / "m") as served:
        answers: list[tuple[int, bytes]] = []
        asking = threading.Thread(target=lambda: answers.append(served.range(500, 2000, Exo_Wait_S="20")[::2]))
        asking.start()
        parts.bring((0, 100))
        parts.bring((500, 600))
        asking.join(DEADLINE_S)
        assert answers == [(206, content[500:600])]


def test_a_wait_ends_without_an_answer_after_its_time(tmp_path: Path) -> None:
    Arriving(tmp_path / "m", bytes(1000))
    with serving(tmp_path / "m") as served:
        assert served.range(0, 9, **{WAIT_HEADER: "0.15"})[0] == 416


def test_a_server_stops_though_connections_wait_or_idle(tmp_path: Path) -> None:
    Arriving(tmp_path / "m", bytes(1000))
    with ExitStack() as stack:
        served = stack.enter_context(serving(tmp_path / "m"))
        socks = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(3)]
        socks[0].sendall(
            f"GET {path_of(NAME, WEIGHTS)} HTTP/1.1\r\nRange: bytes=0-9\r\nExo-Wait-S: 30\r\n\r\n".encode()
        )
        socks[1].sendall(b"GET /mod")
        served.server.stop()
        assert not [thread for thread in threading.enumerate() if thread.name == "peer-files"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", served.port))


class Strangers:
    """TLS of those who are not of the mesh."""

    def __init__(self, authority: bytes) -> None:
        nobody = ssl.create_default_context(cadata=authority.decode())
        self.contexts = {"no certificate": nobody}
        for name, own in {"another mesh": of_another_mesh(authority), "self-signed": self_signed(authority)}.items():
            self.contexts[name] = client_context(Credentials(own.authority, own.certificate, own.private_key))
        for context in self.contexts.values():
            context.check_hostname = False


def test_a_closed_mesh_serves_its_members_and_no_strangers(tmp_path: Path) -> None:
    own = credentials_of(SECRET)
    with serving(tmp_path / "m", own) as served:
        member = client_context(credentials_of(SECRET, "other"))
        member.check_hostname = False
        assert served.get(path_of(NAME, "config.json"), tls=member)[::2] == (200, b"{}")
        for name, context in Strangers(own.authority).contexts.items():
            with pytest.raises(OSError):
                pytest.fail(f"{name}: {served.get(path_of(NAME, 'config.json'), tls=context)}")
        with pytest.raises(OSError):
            served.get(path_of(NAME))


def test_renewed_credentials_are_shown_to_new_connections(tmp_path: Path) -> None:
    source = RenewedCredentials(credentials_of(SECRET))
    with serving(tmp_path / "m", source) as served:

        def shown() -> object:
            context = client_context(credentials_of(SECRET, "other"))
            plain = socket.create_connection(("127.0.0.1", served.port), DEADLINE_S)
            with context.wrap_socket(plain, server_hostname=MESH_DNS_NAME) as sock:
                return sock.getpeercert(binary_form=True)

        first = shown()
        assert shown() == first
        source.replace(credentials_of(SECRET))
        assert shown() != first


def test_a_request_that_comes_slowly_is_dropped(tmp_path: Path) -> None:
    with serving(tmp_path / "m", head_s=0.2) as served:
        sock = socket.create_connection(("127.0.0.1", served.port), DEADLINE_S)
        stop = threading.Event()

        def drip() -> None:
            try:
                while not stop.wait(0.02):
                    sock.sendall(b"x")
            except OSError:
                return

        with sock:
            sock.sendall(b"GET /")
            dripping = threading.Thread(target=drip)
            dripping.start()
            with suppress(ConnectionResetError):
                assert sock.recv(100) == b""
            stop.set()
            dripping.join()


@pytest.mark.parametrize("is_closed_mesh", [False, True])
def test_a_hundred_idle_sockets_keep_no_peer_out(tmp_path: Path, is_closed_mesh: bool) -> None:
    with ExitStack() as stack:
        served = stack.enter_context(
            serving(tmp_path / "m", credentials_of(SECRET) if is_closed_mesh else None, max_connections=8)
        )
        member = client_context(credentials_of(SECRET, "other")) if is_closed_mesh else None
        if member:
            member.check_hostname = False
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), DEADLINE_S))
        assert served.get(path_of(NAME, "config.json"), tls=member)[0] == 200
        assert len([thread for thread in threading.enumerate() if thread.name == "peer-files"]) < 30


def test_one_who_asks_while_all_are_at_work_is_served_by_the_first_that_is_done(tmp_path: Path) -> None:
    parts = Arriving(tmp_path / "m", bytes(1000))
    with serving(tmp_path / "m", max_connections=2) as served:
        statuses: list[int] = []
        waiting = [
            threading.Thread(target=lambda: statuses.append(served.range(0, 9, Exo_Wait_S="20")[0])) for _ in range(2)
        ]
        for thread in waiting:
            thread.start()
        wait_until(lambda: all(one.is_idle is False for one in served.server._connections._open) and
                   len(served.server._connections._open) == 2)  # fmt: skip
        assert served.get(path_of(NAME, "config.json"))[0] == 200
        parts.bring((0, 1000))
        for thread in waiting:
            thread.join(DEADLINE_S)
        assert 416 in statuses and set(statuses) <= {206, 416}, "one of the two has made room"
