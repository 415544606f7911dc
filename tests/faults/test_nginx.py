"""A real nginx with the shipped configuration before three real nodes: streams, the death of a node, and restarts."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from exo_mesh.client.api_client import ApiClient
from tests.support.nginx import NGINX, ShippedNginx, shipped_nginx
from tools.faults.client_threads import ClientThreads
from tools.faults.drawn import HOP_S
from tools.faults.invariants import check_all
from tools.faults.keyed import KeyedClients
from tools.faults.mesh import MODEL, FaultMesh, Node, fault_mesh, wait_until
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
    """Tokens that the drivers on a node have drawn."""
    return sum(beat["tokens"] for beat in node.state()["stages_here"].values())


@pytest.mark.extended
@pytest.mark.timeout(120)
def test_chunks_arrive_one_by_one_and_a_killed_node_costs_no_answer(tmp_path: Path) -> None:
    with behind_nginx(tmp_path, 2) as (mesh, proxy):
        stream = Stream(proxy, counting(10, 40))
        stream.await_end()
        assert stream.is_right, stream.message
        times = [at for at, _ in stream.pieces]
        gaps = [after - before for before, after in pairwise(times)]
        apart = sum(gap > HOP_S / 2 for gap in gaps)
        assert apart > 0.8 * len(gaps), "most chunks come by themselves, a lap of the ring after the one before"
        clients = KeyedClients(lambda: [proxy.url], 4, seed=3)
        clients.await_answers(2)
        mesh.nodes[0].send(signal.SIGKILL)
        clients.await_answers(6)
        clients.stop()
    print(f"measured: {len(times)} chunks in {times[-1] - times[0]:.2f} s, longest gap {max(gaps):.3f} s")
    print(f"measured: {len(clients.answers)} answers over the kill, after {dict(clients.troubles)}")


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
    before = drawn(driver)
    stream = Stream(proxy, question)
    stream.await_end()
    assert stream.is_right, stream.message
    return drawn(driver) - before


def record(what: str, longest_s: float, note: str) -> None:
    test = "test_nginx.py::" + os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split("[")[0].split(" ")[0]
    keep(Row("behind nginx", what, test, None, longest_s, None, 0, note))


LONG = counting(10, 60)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["outside the ring", "first stage", "driver"])
def test_every_stream_with_a_key_is_whole_after_a_node_was_killed(place: str, tmp_path: Path) -> None:
    with around(tmp_path, place) as (_, proxy, doomed, driver):
        each, before = tokens_of(LONG, proxy, driver), drawn(driver)
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
            assert drawn(driver) - before == STREAMS * each, "the mesh has drawn each token once"
        longest_s = max(stream.gap_s(killed_at) for stream in streams)
    note = f"{STREAMS} streams with an Idempotency-Key: {again} times asked again, all whole, no token drawn twice"
    record(f"kill -9 of a node, {place}", longest_s, note)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stream_without_a_key_is_cut_and_not_made_a_second_time(tmp_path: Path) -> None:
    with around(tmp_path, "outside the ring") as (_, proxy, doomed, driver):
        each, before = tokens_of(LONG, proxy, driver), drawn(driver)
        streams = [Stream(proxy, LONG) for _ in range(STREAMS)]
        assert all(stream.await_text(20) for stream in streams)
        doomed.send(signal.SIGKILL)
        killed_at = time.time()
        for stream in streams:
            stream.await_end()
        cut = [stream for stream in streams if not stream.is_right]
        assert {stream.error for stream in cut} == {"broken_off"}
        assert all(LONG.answer.startswith(stream.text) for stream in cut)
        made = drawn(driver) - before
        assert (STREAMS - len(cut)) * each < made < STREAMS * each, "what was cut has not been made again"
        asked = [line for line in proxy.passed() if line.path == CHAT]
        assert len(asked) == STREAMS + 1 and all(len(line.nodes) == 1 for line in asked), "each went to one node"
        longest_s = max(stream.gap_s(killed_at) for stream in streams if stream.is_right)
    record(
        "kill -9 of a node, outside the ring",
        longest_s,
        f"{STREAMS} streams without a key: {len(cut)} cut with the node, the others whole, none made twice",
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_answer_that_is_not_streamed_outlives_its_entry_peer_without_a_key_of_the_client(tmp_path: Path) -> None:
    """nginx gives each request a key, so that sending it to the next node continues it."""
    with around(tmp_path, "outside the ring") as (_, proxy, doomed, driver):
        each, before = tokens_of(LONG, proxy, driver), drawn(driver)
        body = {"model": MODEL, "messages": [{"role": "user", "content": LONG.text}], "temperature": 0}
        begin = time.monotonic()
        with ThreadPoolExecutor(STREAMS) as pool:
            asked = [pool.submit(ApiClient(proxy.url).post, CHAT, body, 120) for _ in range(STREAMS)]
            wait_until(lambda: drawn(driver) - before > STREAMS * each // 4, 60, "all of them are on their way")
            doomed.send(signal.SIGKILL)
            texts = [one.result()["choices"][0]["message"]["content"] for one in asked]
        assert texts == [LONG.answer] * STREAMS
        assert drawn(driver) - before == STREAMS * each, "the mesh has drawn each token once"
        went_on = sum(len(line.nodes) > 1 for line in proxy.passed())
        assert went_on, "some of the requests were at the killed node"
    note = f"{STREAMS} answers in one piece, without a key: {went_on} sent on by nginx, all whole, no token drawn twice"
    record("kill -9 of a node, outside the ring", time.monotonic() - begin, note)


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
    """Without a key: answers shorter than --stop-grace. With one: also those that are cut by its end."""
    with behind_nginx(tmp_path, 3, "--stop-grace", "4") as (mesh, proxy):
        short, keyed = ShortAnswers(proxy, 4, seed=5), KeyedClients(lambda: [proxy.url], 4, seed=6)
        short.await_answers(4)
        keyed.await_answers(2)
        for node in mesh.nodes:
            assert node.child is not None
            os.kill(node.child.pid, signal.SIGTERM)
            node.child._process.wait(40)
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
        f"three nodes, one by one, --stop-grace 4: {len(short.answers)} answers without a key (slowest {slowest_s:.1f} s) "
        f"and {len(keyed.answers)} with one, tried again after {dict(keyed.troubles)}; 0 failed. "
        f"What nginx got from the nodes: {dict(ways)}"
    )
    record("rolling restart under load", longest_s, note)
