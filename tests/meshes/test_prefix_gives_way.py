"""What a ring keeps of ended requests gives way before anything that runs: on small machines, and when memory gets
short while it answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.peers import Peer, mesh
from tests.support.processes import eventually

pytestmark = [pytest.mark.extended, pytest.mark.slow]

NAME = "small"
CONTEXT = 2048
EXACT = ["--engine-option", "mode=deterministic"]
"""The same bits for every chunk, so that answers can be compared character by character."""

LENGTH, TOKENS = 400, 80
"""Tokens of each prompt and of each answer."""


NUM_PROMPTS = 9


def prompt(number: int) -> list[int]:
    return [3 + (7 * number + 11 * place) % 250 for place in range(LENGTH)]


class Ring:
    """Two nodes, a stage on each. The first one is asked."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        wish = {"model": NAME, "min_peers": 2}
        self.instance = peers[0].api.post("/instance", wish, 90)

    def ask(self, number: int, tokens: int = TOKENS) -> str:
        body = {"model": NAME, "prompt": prompt(number), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        reply = self.peers[0].api.post("/v1/completions", body, 60)
        assert reply["usage"]["completion_tokens"] == tokens
        return str(reply["choices"][0]["text"])

    def driver(self) -> dict[str, Any]:
        """What the first stage says of its memory."""
        stages = [stage for peer in self.peers for stage in peer.api.get("/memory")["stages"]]
        return dict(next(stage for stage in stages if "on" in stage["prefix_cache"]))

    def cached(self) -> int:
        """Positions of ended requests that are kept."""
        return int(self.driver()["prefix_cache"]["tokens"])


@contextmanager
def ring(root: Path, *flags: str, each: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())) -> Iterator[Ring]:
    models = root / "models"
    if not models.exists():
        write_checkpoint(
            models / NAME, TinyModel(layers=4, heads=8, kv_heads=8, hidden=512, intermediate=64, context=CONTEXT)
        )
    always = [*EXACT, "--models-dir", str(models), "--discovery", "none", *flags]
    with mesh(root, [[*always, *own] for own in each], engine="numpy") as peers:
        yield Ring(peers)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers to the prompts of a ring that keeps nothing and is short of nothing."""
    with ring(tmp_path_factory.mktemp("off"), "--prefix-cache", "off") as here:
        return [here.ask(number) for number in range(NUM_PROMPTS)]


def test_on_a_small_machine_kept_prompts_make_room_and_running_answers_are_not_touched(
    tmp_path: Path, answers: list[str]
) -> None:
    with ring(tmp_path, each=(("--override-memory", "465MB"),) * 2) as here:
        assert here.instance["kv_pool_tokens"] == CONTEXT, "there is memory for one long sequence, or four of these"
        for number in range(NUM_PROMPTS - 4):
            assert here.ask(number) == answers[number]
        assert eventually(lambda: here.cached() > 2 * LENGTH), "it keeps what fits"
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(here.ask, range(NUM_PROMPTS - 4, NUM_PROMPTS))) == answers[-4:]
        assert eventually(lambda: here.driver()["prefix_cache"]["evictions"] >= NUM_PROMPTS - 4)
        assert here.driver()["evictions"] == 0, "no running answer gave its memory back"
        assert here.cached() <= CONTEXT
        assert {peer.api.get("/memory")["level"] for peer in here.peers} == {"ok"}


@pytest.mark.parametrize(("level", "available"), [("warn", "700MiB"), ("critical", "500MiB")])
def test_what_is_kept_goes_when_the_memory_of_another_machine_gets_short(
    tmp_path: Path, answers: list[str], level: str, available: str
) -> None:
    memory = tmp_path / "memory"
    memory.write_text("16GiB 12GiB")
    with ring(tmp_path, each=((), ("--fake-mem-file", str(memory)))) as here, ThreadPoolExecutor(1) as thread:
        for number in range(2):
            here.ask(number)
        assert eventually(lambda: here.cached() >= 2 * LENGTH)
        running: Future[str] = thread.submit(here.ask, 2, 800)
        assert eventually(lambda: here.driver()["sequences"] == 1)
        memory.write_text(f"16GiB {available}")
        assert eventually(lambda: here.peers[1].api.get("/memory")["level"] == level)
        assert eventually(lambda: here.cached() == 0)
        log = "".join(peer.log for peer in here.peers)
        assert log.count("is short of memory: the prefix cache gives its") == 1
        assert not running.done(), "it was the only one that still ran"
        assert running.result(60).startswith(answers[2])
        assert here.driver()["evictions"] == 0
        memory.write_text("16GiB 12GiB")
        assert eventually(lambda: here.peers[1].api.get("/memory")["level"] == "ok")
        assert here.ask(0) == answers[0]
