"""`exo-mesh top`: what is drawn for any mesh on any screen, its keys, and real nodes of which one dies."""

from __future__ import annotations

import http.server
import json
import os
import re
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.text import Text

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from exo_mesh.cli.client.mesh_nodes import MeshNodes
from exo_mesh.cli.stage_colours import STAGE_COLOURS, stage_colour
from exo_mesh.cli.verbs.top import feed
from exo_mesh.cli.verbs.top.keys import named
from exo_mesh.cli.verbs.top.live_data import MAX_CURVE, LiveData, patched
from exo_mesh.cli.verbs.top.screen import Look, drawn, shares, sparkline
from exo_mesh.cli.verbs.top.sections import sections
from exo_mesh.domain.reports import LinkReport
from tests.cli.closed_port import closed_port
from tests.support.processes import COMMAND, clean_environ, eventually, run
from tests.support.terminal import plain, terminal

GB = 10**9
LATENCY = {"p50": 1.5, "p95": 20.0}


def a_peer(name: str, **more: Any) -> dict[str, Any]:
    figures = {"usable_bytes": 8 * GB, "reserved_bytes": 3 * GB, "total_bytes": 16 * GB, "load": 0.5}
    address = {"api_url": f"http://{name}.local:52415", "devices": [{"engine": "mlx"}], "tokens": {}}
    return {"id": f"id-{name}", "name": name, **figures, **address, **more}


def a_document(num_peers: int = 2, **more: Any) -> dict[str, Any]:
    names = ["alpha", "beta", *(f"p{number}" for number in range(3, num_peers + 1))][:num_peers]
    stages = [{"peer": f"id-{name}", "layers": [4 * index, 4 * index + 4]} for index, name in enumerate(names)]
    instance = {"id": "m-1", "model": "org/model", "state": "ready", "reason": "", "stages": stages}
    reason = {"code": "disk_full", "level": "degraded", "message": "the disk is full", "remedy": "delete a model"}
    return {
        "time": 100.0,
        "node_id": "id-alpha",
        "peers": {f"id-{name}": a_peer(name) for name in names},
        "instances": {"m-1": instance},
        "downloads": {},
        "health": {"status": "degraded", "level": "degraded", "reasons": [], "peer_health": [
            {"id": "id-beta", "name": "beta", "level": "degraded", "reasons": [reason]}], "instance_health": []},
        "queue": {"in_progress": 3, "waiting": 1, "max": 32, "instances": [{"instance": "m-1", "running": 3}]},
        "requests": {"total": 9, "error_rate": 0.125, "avg_tokens_per_s": 17.25, "latency_s": LATENCY},
        "memory": {"pressure_pct": 42.0, "available_bytes": 9 * GB, "total_bytes": 16 * GB, "level": "ok"},
        **more,
    }  # fmt: skip


def a_request(number: int, **more: Any) -> dict[str, Any]:
    figures = {"prompt_tokens": 9, "output_tokens": number, "ttft_s": 0.25, "duration_s": 2.0, "tokens_per_s": 1.0}
    return {"ended_at": 1000.0 + number, "model": "org/model", "outcome": "stop", "status": "ok", **figures, **more}


def a_view(num_peers: int = 2, num_requests: int = 3, **more: Any) -> LiveData:
    data = LiveData(source="live", requests=[a_request(number) for number in range(num_requests)])
    data.take(a_document(num_peers, **more))
    return data


def shown(data: LiveData, look: Look | None = None, width: int = 120, height: int | None = None) -> str:
    return "\n".join(line.plain for line in drawn(data, look or Look(), width, height, "12:00:00"))


def test_everything_that_is_known_is_shown() -> None:
    link = {
        "from": "id-alpha",
        "to": "id-beta",
        "rtt_ms": 0.421,
        "mb_per_s": 88.5,
        "mb_per_s_at": 40.0,
        "paths": [{"kind": "ethernet"}],
    }
    download = {
        "model": "org/new", "peer": "id-beta", "state": "ongoing", "done_bytes": GB, "total_bytes": 4 * GB,
        "bytes_per_s": 5e7, "eta_s": 60.0,
    }  # fmt: skip
    text = shown(a_view(links={"x": link}, downloads={"y": download, "z": {**download, "state": "completed"}}))
    for part in (
        "alpha → beta  ethernet     0.42 ms  88 MB/s, 60 s ago",
        "org/new   beta  ongoing  25 %  4.0 GB  50.0 MB/s  60 s",
        "alpha  peers: 2  degraded  live", "3 running, 1/32 waiting", "12.5 % errors", "17.2 tokens/s", "p50 1.50 s",
        "p95 20 s", "42 % used, 9.0 GB of 16.0 GB free", "beta: the disk is full -> delete a model", "alpha *",
        "8.0 GB", "org/model  ready", "alpha 0-3 → beta 4-7", "stop",
    ):  # fmt: skip
        assert part in text, part


def test_each_stage_of_a_ring_has_its_colour() -> None:
    ring = sections(a_view(), 120)[1].rows[0].cells[-1]
    assert isinstance(ring, Text)
    colours = [(ring.plain[span.start : span.end], span.style) for span in ring.spans if span.style]
    assert colours == [("alpha 0-3", stage_colour(0)), ("beta 4-7", stage_colour(1))]
    assert stage_colour(len(STAGE_COLOURS)) == stage_colour(0)


def test_a_link_that_nobody_measured_is_drawn_after_a_patch_that_leaves_out_what_is_null() -> None:
    link = LinkReport(source="id-alpha", to="id-beta", address="a:1", rtt_ms=None, mb_per_s=None, paths=[])
    data = a_view()
    data.take(patched(data.document, {"links": {"x": msgspec.to_builtins(link)}}))
    assert re.search(r"alpha → beta +- +\? +\?", shown(data))


def test_the_role_of_each_peer_is_a_column() -> None:
    data = a_view()
    data.document["peers"]["id-beta"]["role"] = "api"
    rows = [line.split() for line in shown(data).splitlines()]
    header = next(row for row in rows if row[:1] == ["PEER"])
    found = {row[0]: row for row in rows if row[:1] in (["alpha"], ["beta"]) and "mlx" in row}
    assert header.index("ROLE") == 2 and "full" in found["alpha"] and "api" in found["beta"]


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (40, 10), (20, 5), (1, 1), (132, 3)])
@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (2, 3), (40, 200)])
def test_it_fits_every_screen(size: tuple[int, int], counts: tuple[int, int]) -> None:
    num_peers, num_requests = counts
    data = a_view(num_peers, num_requests) if num_peers else LiveData()
    lines = drawn(data, Look(), *size, "12:00:00")
    assert len(lines) <= size[1]
    assert max(line.cell_len for line in lines) <= size[0]


def test_wide_letters_do_not_break_the_columns() -> None:
    document = a_document()
    document["peers"]["id-alpha"]["name"] = "机器" * 30
    data = LiveData()
    data.take(document)
    lines = drawn(data, Look(), 80, 24, "")
    assert max(line.cell_len for line in lines) <= 80
    rows = [line for line in lines if "GB" in line.plain and "memory" not in line.plain]
    assert len({Text(line.plain.partition("ok")[0].partition("degraded")[0]).cell_len for line in rows}) == 1


def test_a_narrow_screen_drops_what_is_least_needed() -> None:
    assert "ADDRESS" in shown(a_view(), width=100)
    narrow = shown(a_view(), width=60)
    assert "ADDRESS" not in narrow and "PEER" in narrow and "LOAD" in narrow


def test_rows_are_shared_fairly_and_scrolled() -> None:
    assert shares([2, 1, 50], 10) == [2, 1, 7]
    assert shares([50, 50], 5) == [3, 2]
    assert shares([3], 0) == [0]
    look, data = Look(focus=2), a_view(num_requests=50)
    assert "rows 1 to 11 of 50" in shown(data, look, 80, 26)
    for _ in range(60):
        look.press("down", sections(data, 80))
    last = shown(data, look, 80, 26)
    assert "rows 40 to 50 of 50" in last and "  49  " in last


def test_arrows_sort_the_table_that_tab_chose() -> None:
    data, look = a_view(num_requests=3), Look()
    for key in ("tab", "tab", *["right"] * 5, "r"):
        look.press(key, sections(data, 120))
    counts = [line.split()[4] for line in shown(data, look, 120, 30).splitlines() if " stop " in line]
    assert (look.focus, counts) == (2, ["2", "1", "0"])
    for _ in range(5):
        look.press("left", sections(data, 120))
    assert look.sort_by["REQUESTS"] == -1
    look.press("left", sections(data, 120))
    assert look.sort_by["REQUESTS"] == 7
    look.press("p", ())
    assert look.is_paused


def test_rates_come_from_the_counters_of_the_drivers() -> None:
    data = LiveData()
    for time, tokens in ((100.0, 5), (102.0, 25)):
        document = a_document(time=time)
        document["peers"]["id-beta"]["tokens"] = {"m-1": tokens}
        data.take(document)
    assert data.rates == {"m-1": 10.0}
    assert "10.0" in shown(data)
    document = a_document(time=104.0)
    data.take(document)
    assert data.rates == {}, "a new driver counts from nothing"


def test_the_curve_is_bounded_and_of_one_node() -> None:
    data = LiveData()
    for number in range(2 * MAX_CURVE):
        data.take(a_document(time=float(number)))
    assert len(data.curve) == MAX_CURVE
    data.take(a_document(node_id="id-beta", time=1000.0))
    assert data.curve == [42.0]
    assert sparkline([0, 50, 100, 200]) == " ▄██"


def test_patches_are_those_of_rfc_7396() -> None:
    document = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert patched(document, {"a": {"b": None, "e": {"f": 3}}, "d": [2]}) == {"a": {"c": 2, "e": {"f": 3}}, "d": [2]}
    assert document["a"] == {"b": 1, "c": 2}, "what is on the screen does not change"


def test_keys_have_names() -> None:
    assert named("q\t\x1b[A\x1bOB\x1b[C\x1b[D") == ["q", "tab", "up", "down", "right", "left"]


class FullNode(http.server.BaseHTTPRequestHandler):
    """A node whose streams are all taken; it answers snapshots."""

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        full = {"error": {"message": "64 clients read the live data", "code": "overloaded"}}
        answers = {"/metrics/snapshot": (200, a_document()), "/metrics/stream": (429, full)}
        status, body = answers.get(self.path, (200, {"requests": [a_request(7)]}))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


def test_a_full_node_is_asked_for_snapshots_and_a_dead_one_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "POLL_S", 0.01)
    monkeypatch.setattr(feed, "RETRY_S", 0.01)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FullNode) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        nodes = MeshNodes(ApiClient(f"http://127.0.0.1:{closed_port()}", tmp_path))
        url = f"http://127.0.0.1:{server.server_address[1]}"
        nodes.note([{"name": "beta", "api_url": url}], {"mesh": "open"})
        follower = feed.LiveDataFeed(nodes)
        follower.start()
        assert eventually(lambda: follower.data.source == "snapshots")
        assert eventually(lambda: [one["output_tokens"] for one in follower.data.requests] == [7])
        assert eventually(lambda: (follower.data.note, follower.data.url) == ("", url))
        assert wait_for_bell(follower.wake)
        follower.stop()
        follower.join()
        server.shutdown()
        thread.join()


def wait_for_bell(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 5)[0])


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with local_mesh(2, ["--engine", "dummy"], "top", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client().post("/instance", {"model": "exo-mesh-demo", "min_peers": 2}, 60.0)
        yield mesh


@pytest.mark.extended
def test_without_a_terminal_it_prints_one_snapshot(mesh: LocalMesh, tmp_path: Path) -> None:
    done = run(["top", "--api-url", mesh.api_urls[1]], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "peer-1 0-3 → peer-2 4-7" in done.stdout and "peer-2 *" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.extended
def test_it_goes_on_at_another_member_and_gives_the_terminal_back(mesh: LocalMesh, tmp_path: Path) -> None:
    """The last test of this mesh, since it kills a node of it."""
    argv, environ = [*COMMAND, "top", "--api-url", mesh.api_urls[0]], clean_environ(tmp_path)
    with terminal(argv, {**environ, "NO_COLOR": "1"}) as top:
        top.wait_for("peer-1 *")
        top.wait_for("q quit")
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", top.shown), "NO_COLOR: bold and dim only"
        top.send("p")
        top.wait_for("paused")
        top.send("p")
        os.kill(mesh.children[0].pid, signal.SIGKILL)
        top.wait_for("asking peer-2")
        top.wait_for("peer-2 *")
        top.resize(132, 40)
        top.wait_for("q quit")
        top.send("q")
        assert top.wait_end() == 0
        assert top.shown.rstrip().endswith("\x1b[?1049l"), "the screen of the shell is back"
        assert "Traceback" not in plain(top.shown)
