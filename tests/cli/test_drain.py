"""What `exo-mesh drain` says while it waits, if it gives up, and of layers that stay."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from exo_mesh.cli.main import main
from exo_mesh.cli.verbs.drain import staying


class BusyNode(http.server.BaseHTTPRequestHandler):
    """A node whose stages always have three sequences of other peers."""

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        state = {"node_id": "a", "view": {"peers": [], "instances": []}}
        drain = {"draining": True, "drained": False, "requests": 1, "sequences": 3}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(state if self.path == "/state" else drain).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()


def test_it_says_at_once_what_it_waits_for_and_what_is_left_when_it_gives_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), BusyNode) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert main(["drain", "--wait", "0", "--api-url", f"http://127.0.0.1:{server.server_port}"]) == 1
        server.shutdown()
    shown = capsys.readouterr()
    left = "1 request to this node and 3 sequences on its stages"
    assert shown.err == f"waiting for {left}, for up to 0 s\n"
    said = f"not drained: {left} still run; if the node stops now, requests of other peers pause and continue"
    assert " ".join(shown.out.split()) == said


def test_layers_that_stay_until_the_node_stops_are_named() -> None:
    ring = {"model": "m", "stages": [{"peer": "a", "layers": [0, 4]}, {"peer": "b", "layers": [4, 8]}]}
    alone = {"model": "whole", "stages": [{"peer": "a", "layers": [0, 8]}]}
    group = {"model": "g", "stages": [{"peer": "b", "layers": [0, 1], "group": {"peers": ["b", "a"]}}]}
    elsewhere = {"model": "other", "stages": [{"peer": "c", "layers": [0, 8]}]}
    pause = "answers that use it then pause until other peers have loaded these layers"
    state = {
        "node_id": "a",
        "view": {"peers": [{"id": "a"}, {"id": "b"}], "instances": [ring, alone, group, elsewhere]},
    }
    assert staying(state) == [
        f"m 0-3 stays here until the node stops; {pause}",
        "whole 0-7 stays here until the node stops; then another peer loads it for the next request",
        f"g 0 stays here until the node stops; {pause}",
    ]
    assert staying({"node_id": "d", "view": {"peers": [], "instances": [ring]}}) == []


def test_layers_stay_without_harm_where_another_instance_serves_the_model() -> None:
    ring = {
        "model": "m",
        "state": "ready",
        "stages": [{"peer": "a", "layers": [0, 4]}, {"peer": "b", "layers": [4, 8]}],
    }
    other = {"model": "m", "state": "ready", "stages": [{"peer": "b", "layers": [0, 8]}]}
    peers = [{"id": "a"}, {"id": "b"}]
    state = {"node_id": "a", "view": {"peers": peers, "instances": [ring, other]}}
    assert staying(state) == ["m 0-3 stays here until the node stops; new requests use another instance"]


def test_a_node_without_others_promises_nothing_for_its_layers() -> None:
    alone = {"model": "whole", "stages": [{"peer": "a", "layers": [0, 8]}]}
    assert staying({"node_id": "a", "view": {"peers": [{"id": "a"}], "instances": [alone]}}) == [
        "whole 0-7 stays here until the node stops; no other peer is there to load it then"
    ]
