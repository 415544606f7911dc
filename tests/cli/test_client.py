"""The client of the reading verbs: every failure is one clear MeshError."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from exo_mesh.cli.client.api_client import ApiClient, NoNodeError
from exo_mesh.cli.verbs.chat.answer import ask
from exo_mesh.errors import DeadlineError, MeshError, OverloadError, TransportError, UnknownModelError
from tests.cli.closed_port import closed_port


class Answers(http.server.BaseHTTPRequestHandler):
    """Plays what the path asks for."""

    protocol_version = "HTTP/1.0"
    release = threading.Event()

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        if self.path == "/silent":
            self.release.wait(10)
        elif self.path == "/html":
            self._reply(200, b"<html>")
        elif self.path == "/bare":
            self._reply(502, b"bad gateway")
        elif self.path == "/unknown":
            self._reply(404, json.dumps({"error": {"message": "no model x", "code": "model_not_found"}}).encode())
        else:
            self._reply(200, b'{"path": "%s"}' % self.path.encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        chunk = {"choices": [{"delta": {"content": "one "}, "finish_reason": None}]}
        last = {"choices": [{"delta": {"content": "two"}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
        lines = {
            "/v1/chat/completions": [": keep-alive", chunk, last, usage, "data: [DONE]"],
            "/broken": [chunk],
            "/error": [chunk, {"error": {"message": "queue is full", "code": "overloaded"}}],
            "/garbage": ["data: {"],
        }[self.path]
        texts = [line if isinstance(line, str) else f"data: {json.dumps(line)}" for line in lines]
        self._reply(200, "".join(f"{text}\n\n" for text in texts).encode())

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def client() -> Iterator[ApiClient]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Answers.release.clear()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield ApiClient(f"http://127.0.0.1:{server.server_port}/")
        Answers.release.set()
        server.shutdown()
        thread.join()


def test_answers_are_json(client: ApiClient) -> None:
    assert client.get("/state") == {"path": "/state"}


def test_a_proxy_of_the_environment_is_not_asked(client: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
    assert ApiClient(client.url).get("/state") == {"path": "/state"}


def test_the_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXO_MESH_API_URL", "beta:52415")
    assert ApiClient().url == "http://beta:52415"
    assert ApiClient("https://gamma/").url == "https://gamma"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost", "http://localhost:52415"), ("beta:80", "http://beta:80"), (":8080", "http://127.0.0.1:8080"),
        ("10.0.0.1/v1", "http://10.0.0.1:52415"), ("[fd00::2]", "http://[fd00::2]:52415"),
        ("[fd00::2]:80", "http://[fd00::2]:80"), ("http://beta", "http://beta"), ("https://beta", "https://beta"),
    ],
)  # fmt: skip
def test_an_address_without_scheme_gets_the_usual_host_and_port(text: str, url: str) -> None:
    assert ApiClient(text).url == url


@pytest.mark.parametrize(
    "ending",
    ["", "/", "//", "/v1", "/v1/", "/v1/chat/completions", "/v1/messages/", "/?a=b", "/#token=exo-local-A", "/v1#x"],
)
def test_the_address_of_other_clients_is_accepted(client: ApiClient, ending: str) -> None:
    assert ApiClient(client.url + ending).get("/healthz") == {"path": "/healthz"}
    assert ApiClient(f"{client.url}/mesh/v1x{ending}").get("/healthz") == {"path": "/mesh/v1x/healthz"}


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("/unknown", UnknownModelError, "no model x"),
        ("/bare", MeshError, "/bare: HTTP status 502"),
        ("/html", TransportError, "did not answer with JSON"),
        ("/silent", DeadlineError, "did not answer within 0.1 s"),
    ],
)
def test_failures_are_mesh_errors(client: ApiClient, path: str, kind: type[MeshError], message: str) -> None:
    with pytest.raises(kind, match=message):
        client.get(path, 0.1 if path == "/silent" else 5.0)


def test_nobody_there_is_an_error_of_its_own() -> None:
    with pytest.raises(NoNodeError, match="no node answers"):
        ApiClient(f"http://127.0.0.1:{closed_port()}").get("/health")


def test_an_answer_streams_and_is_timed(client: ApiClient) -> None:
    pieces: list[str] = []
    answer = ask(client, "m", [{"role": "user", "content": "q"}], {}, pieces.append)
    assert pieces == ["one ", "two"]
    assert (answer.text, answer.finish_reason, answer.completion_tokens) == ("one two", "stop", 2)
    assert answer.first_token_s <= answer.total_s


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("/broken", TransportError, "ended early"),
        ("/garbage", TransportError, "ended early or is damaged"),
        ("/error", OverloadError, "queue is full"),
    ],
)
def test_a_stream_that_fails_says_so(client: ApiClient, path: str, kind: type[MeshError], message: str) -> None:
    with pytest.raises(kind, match=message):
        list(client.stream(path, {}))
