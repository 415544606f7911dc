"""An answer goes on at another member: what is shown when nodes break off, refuse, are silent, or answer otherwise."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli.client.api_client import ApiClient, NoNodeError
from exo_mesh.cli.client.mesh_nodes import MeshNodes
from exo_mesh.cli.verbs.chat import following
from exo_mesh.cli.verbs.chat.following import follow
from exo_mesh.cli.verbs.chat.sinks import PlainSink, SilentSink, TerminalSink
from exo_mesh.errors import InputError, MeshError, OverloadError, TransportError
from tests.cli.closed_port import closed_port

Script = Sequence[Any]
"""What a node answers: strings are text, ("think", text) is reasoning, (status, code) refuses, ("error", code) ends the
stream with an error, ("comment", text) is one, ... ends the answer well. Without it the stream breaks off."""


class ScriptedNode(http.server.BaseHTTPRequestHandler):
    """Answers chats by the scripts of its server, one after the other; the last one stays."""

    protocol_version = "HTTP/1.0"

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        self._say(200, json.dumps({"data": []}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        server.keys.append(self.headers["Idempotency-Key"])
        script = server.scripts.pop(0) if len(server.scripts) > 1 else server.scripts[0]
        if script and isinstance(script[0], tuple) and isinstance(script[0][0], int):
            status, code = script[0]
            self._say(status, json.dumps({"error": {"message": f"refused: {code}", "code": code}}))
        else:
            self._say(200, "".join(map(frame, script)))

    def _say(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())


def frame(part: Any) -> str:
    if part is ...:
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}
        last = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        return f"data: {json.dumps(last)}\n\ndata: {json.dumps(usage)}\n\ndata: [DONE]\n\n"
    if isinstance(part, tuple) and part[0] == "comment":
        return f": {part[1]}\n\n"
    if isinstance(part, tuple) and part[0] == "error":
        return f"data: {json.dumps({'error': {'message': 'it ended', 'code': part[1]}})}\n\n"
    delta = {"reasoning_content": part[1]} if isinstance(part, tuple) else {"content": part}
    return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': None}]})}\n\n"


class Recorder(SilentSink):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, str]] = []

    def text(self, piece: str) -> None:
        self.parts.append(("text", piece))

    def reasoning(self, piece: str) -> None:
        self.parts.append(("think", piece))

    def waiting(self, what: str) -> None:
        self.parts.append(("wait", what))

    def restarted(self) -> None:
        self.parts.append(("restarted", ""))

    def of(self, kind: str) -> str:
        return "".join(text for one, text in self.parts if one == kind)


Mesh = Callable[..., MeshNodes]


@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mesh]:
    """Makes a mesh of nodes with these scripts; None is a node that is gone."""
    monkeypatch.setattr(following, "PAUSE_S", 0.01)
    with ExitStack() as stack:

        def make(*nodes: Sequence[Script] | None) -> MeshNodes:
            urls = []
            for scripts in nodes:
                if scripts is None:
                    urls.append(f"http://127.0.0.1:{closed_port()}")
                    continue
                server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ScriptedNode)
                server.scripts, server.keys = list(scripts), KEYS  # type: ignore[attr-defined]
                thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
                thread.start()
                for end in (server.server_close, thread.join, server.shutdown):
                    stack.callback(end)
                urls.append(f"http://127.0.0.1:{server.server_address[1]}")
            KEYS.clear()
            known = MeshNodes(ApiClient(urls[0], tmp_path))
            known.note([{"name": f"n{i}", "api_url": url} for i, url in enumerate(urls)], {"mesh": "open"})
            return known

        yield make


KEYS: list[str] = []
"""The Idempotency-Key of each question that any node got."""


def ask(nodes: MeshNodes, sink: SilentSink) -> str:
    return follow(nodes, "m", [{"role": "user", "content": "Hi"}], {}, sink).text


def test_a_stream_that_breaks_off_goes_on_at_the_next_node_and_nothing_is_shown_twice(mesh: Mesh) -> None:
    nodes, sink = mesh([["one ", "two "]], [["one two ", "three", ...]]), Recorder()
    assert ask(nodes, sink) == "one two three" == sink.of("text")
    assert len(set(KEYS)) == 1 and len(KEYS) == 2, "both were asked with one key"
    assert "n0 does not answer, trying another member" in sink.of("wait")
    assert nodes.name_of(nodes.client) == "n1", "the next question goes there at once"


def test_thoughts_are_not_shown_twice_either(mesh: Mesh) -> None:
    nodes, sink = mesh([[("think", "hm, "), ("think", "so"), "on"]], [[("think", "hm, so"), "one", ...]]), Recorder()
    assert ask(nodes, sink) == "one" == sink.of("text")
    assert sink.of("think") == "hm, so"


def test_a_node_that_is_gone_before_the_question_is_passed_over(mesh: Mesh) -> None:
    assert ask(mesh(None, None, [["yes", ...]]), Recorder()) == "yes"


@pytest.mark.parametrize("code", ["node_stopping", "not_ready", "transport_error"])
def test_a_node_that_stops_hands_over(mesh: Mesh, code: str) -> None:
    assert ask(mesh([["on", ("error", code)]], [["one", ...]]), Recorder()) == "one"


def test_once_it_has_begun_a_full_queue_is_waited_for(mesh: Mesh) -> None:
    nodes = mesh([["on"]], [[(429, "overloaded")], [(404, "model_not_found")], ["one", ...]])
    assert ask(nodes, Recorder()) == "one"


def test_before_it_has_begun_a_refusal_is_the_answer(mesh: Mesh) -> None:
    with pytest.raises(OverloadError):
        ask(mesh([[(429, "overloaded")]], [["never", ...]]), Recorder())
    with pytest.raises(InputError, match="refused"):
        ask(mesh([[(400, "invalid_request")]], [["never", ...]]), Recorder())


def test_after_a_member_that_wants_a_key_the_named_node_is_asked_again(mesh: Mesh) -> None:
    """On a closed mesh the local token is good for one node only."""
    nodes = mesh([["on"], ["back", ...]], [[(401, "invalid_api_key")]])
    with pytest.raises(MeshError, match="set EXO_MESH_API_KEY"):
        ask(nodes, Recorder())
    assert ask(nodes, Recorder()) == "back"


def test_a_lone_node_that_is_gone_is_no_reason_to_wait(mesh: Mesh) -> None:
    with pytest.raises(NoNodeError):
        ask(mesh(None), Recorder())


def test_a_lone_node_whose_connection_breaks_is_asked_again(mesh: Mesh) -> None:
    assert ask(mesh([["on"], ["one", ...]]), Recorder()) == "one"


def test_without_progress_it_gives_up(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "PATIENCE_S", 0.05)
    with pytest.raises(TransportError, match="ended early"):
        ask(mesh([["on"]], [["on"]]), Recorder())


def test_another_answer_is_said_to_be_one(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine decided otherwise after the entry peer and the driver had died together."""
    sink = Recorder()
    assert ask(mesh([["one two"]], [["one three", ...]]), sink) == "one three"
    assert sink.parts[-2:] == [("restarted", ""), ("text", "one three")]
    nodes = mesh([["one two"]], [["one three", ...]])
    kept: list[str] = []
    with TerminalSink(nodes, "m", kept) as screen:
        ask(nodes, screen)
    assert kept == ["one three"] and "this answer is lost" in capsys.readouterr().out
    nodes = mesh([["one two"]], [["one three", ...]])
    with pytest.raises(MeshError, match="differs"), PlainSink(nodes, "m", [], is_terminal=False) as pipe:
        ask(nodes, pipe)


def test_a_pipe_gets_the_text_as_it_is_and_a_terminal_is_protected(
    mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    script = [("comment", "loading 1/2"), ("think", "hm"), "a\x1b[2Jb\tc\r\n", ...]
    for is_terminal, expected in ((False, "a\x1b[2Jb\tc\r\n\n"), (True, "a\\x1b[2Jb  c\\r\n\n")):
        nodes = mesh([script])
        with PlainSink(nodes, "m", [], is_terminal=is_terminal) as sink:
            ask(nodes, sink)
        assert capsys.readouterr().out == expected


def test_a_terminal_shows_thoughts_above_the_answer(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = mesh([[("think", "\n\nhm "), ("think", "so"), "**one**", ...]])
    with TerminalSink(nodes, "m", []) as sink:
        ask(nodes, sink)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == ["hm so", "", "one"]
