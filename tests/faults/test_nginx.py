"""A real nginx with the shipped configuration before three real nodes: streams, the death of a node, and restarts."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.main import main
from tests.support.nginx import NGINX, ShippedNginx, nginx_command, shipped_nginx
from tests.support.processes import start
from tests.support.proxies import PROGRAMS, a_proxy
from tools.faults.client_threads import ClientThreads
from tools.faults.drawn import HOP_S
from tools.faults.invariants import check_all
from tools.faults.keyed import KeyedClients
from tools.faults.mesh import MODEL, FaultMesh, Meshes, Node, fault_mesh, wait_until
from tools.faults.record import Row, keep
from tools.faults.stream import Question, Stream, counting

pytestmark = pytest.mark.skipif(NGINX is None, reason="not installed: nginx")

STREAMS = 16
CHAT = "/v1/chat/completions"
API_PORT = 52415
"""The same over restarts, as the addresses in a configuration are."""


@contextmanager
def behind_nginx(root: Path, count: int, *flags: str) -> Iterator[tuple[FaultMesh, ShippedNginx]]:
    """A mesh whose model is on all nodes, with some milliseconds for each hop, and nginx before it."""
    with fault_mesh(root, count, "--api-port", str(API_PORT), *flags) as mesh:
        addresses = [f"{node.address}:{API_PORT}" for node in mesh.nodes]
        with shipped_nginx(root / "nginx", addresses) as proxy:
            mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S / 2)
            mesh.place(mesh.nodes)
            yield mesh, proxy


def drawn(node: Node) -> int:
    """Tokens that the drivers on a node have drawn, as far as their last heartbeats say."""
    return sum(beat["tokens"] for beat in node.state()["stages_here"].values())


def all_drawn(node: Node) -> int:
    """The same, once it stays the same: heartbeats are late, and nothing is to be drawn."""
    counts: list[tuple[float, int]] = []

    def stays() -> bool:
        now, count = time.monotonic(), drawn(node)
        counts[:] = [(at, known) for at, known in counts if known == count] + [(now, count)]
        return now - counts[0][0] > 2

    wait_until(stays, 60, "nothing is drawn any more")
    return counts[0][1]


@pytest.mark.extended
@pytest.mark.timeout(120)
def test_every_proxy_passes_the_chunks_of_real_nodes_on_one_by_one(meshes: Meshes, tmp_path: Path) -> None:
    mesh = meshes.of(2)
    mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S / 2)
    mesh.place(mesh.nodes)
    addresses = [urlsplit(node.url).netloc for node in mesh.nodes]
    for kind in [kind for kind, program in PROGRAMS.items() if program]:
        with a_proxy(kind, tmp_path / kind, [*addresses, addresses[0]]) as url:
            stream = Stream(SimpleNamespace(url=url), counting(10, 30))
            stream.await_end()
        assert stream.is_right, f"{kind}: {stream.message}"
        gaps = [after - before for (before, _), (after, _) in pairwise(stream.pieces)]
        assert sum(gap > HOP_S / 2 for gap in gaps) > 0.4 * len(gaps), (
            f"{kind}: at most two at a time, as they are sent"
        )
        print(f"measured: {kind}: {len(stream.pieces)} chunks, {sum(gaps):.2f} s, longest gap {max(gaps):.3f} s")


@pytest.mark.extended
@pytest.mark.timeout(120)
def test_the_configuration_follows_the_mesh(meshes: Meshes, tmp_path: Path) -> None:
    mesh = meshes.of(2)
    staying, going = mesh.nodes
    path, folder = tmp_path / "upstream.conf", tmp_path / "nginx"
    addresses = [urlsplit(node.url).netloc for node in mesh.nodes]
    once = ["nginx-config", "--output", str(path), "--api-url", staying.url]
    assert main([*once, "--variant", "weights"]) == exit_codes.OK
    assert sorted(servers(path)) == sorted(f"{address} weight=1" for address in addresses)
    with shipped_nginx(folder, addresses, upstream=path) as proxy:
        reload = shlex.join([*nginx_command(folder), "-s", "reload"])
        watcher = start([*once, "--watch", "--every", "0.2", "--reload", reload], tmp_path / "home")
        try:
            going.api.post("/drain", {})
            wait_until(lambda: f"{addresses[1]} down" in servers(path), 20, "the draining node is marked")
            answer = Stream(proxy, counting(3, 5))
            answer.await_end()
            assert answer.is_right, answer.message
            going.api.delete("/drain")
            wait_until(lambda: sorted(servers(path)) == sorted(addresses), 20, "it is back")
            clients = KeyedClients(lambda: [proxy.url], 2, seed=3)
            clients.await_answers(1)
            staying.send(signal.SIGKILL)
            wait_until(lambda: servers(path) == addresses[1:], 30, "another member says that it is dead")
            clients.await_answers(3)
            clients.stop()
            going.send(signal.SIGKILL)
            before = path.read_text()
            assert watcher.stderr is not None
            said = next(line for line in watcher.stderr if "is unchanged" in line)
            assert "no node answers" in said and path.read_text() == before, "a mesh that is gone empties nothing"
        finally:
            watcher.terminate()
            watcher.communicate(timeout=10)
            meshes.give_up()


def servers(path: Path) -> list[str]:
    """The nodes in the file, with what is special about them, but for the second try of all of them."""
    lines = [line for line in path.read_text().splitlines() if "server " in line and "backup" not in line]
    return [re.sub(r" max_fails=3 fail_timeout=30s|;.*", "", line).strip().removeprefix("server ") for line in lines]


@contextmanager
def around(root: Path, place: str) -> Iterator[tuple[FaultMesh, ShippedNginx, Node, Node]]:
    """Three nodes behind nginx; the one that will be killed, and the driver of the model's ring."""
    with fault_mesh(root, 3, "--api-port", str(API_PORT)) as mesh:
        doomed, *others = mesh.nodes
        ring = {"outside the ring": others, "first stage": [doomed, *others], "driver": [*others, doomed]}[place]
        with shipped_nginx(root / "nginx", [f"{node.address}:{API_PORT}" for node in mesh.nodes]) as proxy:
            mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S / 2)
            mesh.place(ring, at=others[0])
            yield mesh, proxy, doomed, ring[-1]
            mesh.start()
            check_all(mesh, [], time.time(), visible=False)


def tokens_of(question: Question, proxy: ShippedNginx, driver: Node) -> int:
    """How many tokens the driver draws for one answer."""
    before = all_drawn(driver)
    stream = Stream(proxy, question)
    stream.await_end()
    assert stream.is_right, stream.message
    return all_drawn(driver) - before


def record(what: str, longest_s: float, note: str) -> None:
    test = "test_nginx.py::" + os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split("[")[0].split(" ")[0]
    keep(Row("behind nginx", what, test, None, longest_s, None, 0, note))


LONG = counting(10, 60)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["outside the ring", "first stage", "driver"])
def test_every_stream_with_a_key_is_whole_after_a_node_was_killed(place: str, tmp_path: Path) -> None:
    with around(tmp_path, place) as (_, proxy, doomed, driver):
        each, before = tokens_of(LONG, proxy, driver), all_drawn(driver)
        streams = [Stream(proxy, LONG, elsewhere=[proxy]) for _ in range(STREAMS)]
        assert all(stream.await_text(20) for stream in streams)
        doomed.send(signal.SIGKILL)
        killed_at = time.time()
        for stream in streams:
            stream.await_end()
        wrong = [(stream.outcome, stream.message) for stream in streams if not stream.is_right]
        assert not wrong
        again = sum(stream.num_asked - 1 for stream in streams)
        assert again, "some of the streams came through the killed node"
        if place == "outside the ring":
            assert all_drawn(driver) - before == STREAMS * each, "the mesh has drawn each token once"
        longest_s = max(stream.gap_s(killed_at) for stream in streams)
    once = ", no token drawn twice" if place == "outside the ring" else ""
    note = f"{STREAMS} streams with an Idempotency-Key: asked again {again} times, all whole{once}"
    record(f"kill -9 of a node, {place}", longest_s, note)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stream_without_a_key_is_cut_and_not_made_a_second_time(tmp_path: Path) -> None:
    with around(tmp_path, "outside the ring") as (_, proxy, doomed, driver):
        each, before = tokens_of(LONG, proxy, driver), all_drawn(driver)
        streams = [Stream(proxy, LONG) for _ in range(STREAMS)]
        assert all(stream.await_text(20) for stream in streams)
        doomed.send(signal.SIGKILL)
        killed_at = time.time()
        for stream in streams:
            stream.await_end()
        cut = [stream for stream in streams if not stream.is_right]
        assert {stream.error for stream in cut} == {"broken_off"}
        assert all(LONG.answer.startswith(stream.text) for stream in cut)
        made = all_drawn(driver) - before
        assert (STREAMS - len(cut)) * each < made < STREAMS * each, "what was cut has not been made again"
        asked = [line for line in proxy.passed() if line.path == CHAT]
        assert len(asked) == STREAMS + 1 and all(len(line.nodes) == 1 for line in asked), "each went to one node"
        longest_s = max(stream.gap_s(killed_at) for stream in streams if stream.is_right)
    record(
        "kill -9 of a node, streams without a key",
        longest_s,
        f"{STREAMS} streams without a key: {len(cut)} cut with the node, the others whole, none made twice",
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_answer_that_is_not_streamed_outlives_its_entry_peer_without_a_key_of_the_client(tmp_path: Path) -> None:
    """nginx gives each request a key, so that sending it to the next node continues it."""
    with around(tmp_path, "outside the ring") as (_, proxy, doomed, driver):
        each, before = tokens_of(LONG, proxy, driver), all_drawn(driver)
        body = {"model": MODEL, "messages": [{"role": "user", "content": LONG.text}], "temperature": 0}
        with ThreadPoolExecutor(STREAMS) as pool:
            asked = [pool.submit(ApiClient(proxy.url).post, CHAT, body, 120) for _ in range(STREAMS)]
            wait_until(lambda: drawn(driver) - before > STREAMS * each // 4, 60, "all of them are on their way")
            doomed.send(signal.SIGKILL)
            begin = time.monotonic()
            texts = [one.result()["choices"][0]["message"]["content"] for one in asked]
        lasted_s = time.monotonic() - begin
        assert texts == [LONG.answer] * STREAMS
        assert all_drawn(driver) - before == STREAMS * each, "the mesh has drawn each token once"
        went_on = sum(len(line.nodes) > 1 for line in proxy.passed())
        assert went_on, "some of the requests were at the killed node"
    note = f"{STREAMS} answers in one piece, without a key: {went_on} sent on by nginx, all whole, no token drawn twice"
    record("kill -9 of a node, answers in one piece", lasted_s, note)


class ShortAnswers(ClientThreads[Stream]):
    """Clients without a key that ask once, for answers that take far less than --stop-grace."""

    def __init__(self, proxy: ShippedNginx, count: int, seed: int) -> None:
        self._proxy = proxy
        super().__init__(count, seed)

    def ask(self, rng: random.Random, number: int) -> Stream | str:
        first = rng.randrange(10, 150)
        stream = Stream(self._proxy, counting(first, first + 4))
        stream.ended.wait(120)
        return stream if stream.is_right else f"{stream.outcome} {stream.message} after {stream.text!r}"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rolling_restart_under_load_fails_nobody(tmp_path: Path) -> None:
    """Without a key: answers shorter than --stop-grace. With one: all. test_rolling_restart.py cuts those, too."""
    with behind_nginx(tmp_path, 3, "--stop-grace", "12") as (mesh, proxy):
        short, keyed = ShortAnswers(proxy, 4, seed=5), KeyedClients(lambda: [proxy.url], 4, seed=6)
        short.await_answers(4)
        keyed.await_answers(2)
        for node in mesh.nodes:
            assert node.child is not None
            os.kill(node.child.pid, signal.SIGTERM)
            node.child._process.wait(60)
            short.await_answers(4)
            mesh.start()
            short.await_answers(4)
            keyed.await_answers(2)
        short.stop()
        keyed.stop()
        ways = Counter(" ".join(line.statuses) for line in proxy.passed() if line.path == CHAT)
        check_all(mesh, [], time.time(), visible=False)
    slowest_s = max(answer.ended_at - answer.sent_at for answer in short.answers)
    longest_s = max(answer.gap_s(answer.sent_at) for answer in short.answers)
    note = (
        f"three nodes, one by one, --stop-grace 12: {len(short.answers)} answers without a key (slowest "
        f"{slowest_s:.1f} s) and {len(keyed.answers)} with one, tried again after {dict(keyed.troubles)}; 0 failed. "
        f"What nginx got from the nodes: {dict(ways)}"
    )
    record("rolling restart under load", longest_s, note)
