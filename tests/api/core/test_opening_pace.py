"""Clients that ask for many models in turn cannot keep a node opening tokenizers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from exo_mesh.api.core import texts as texts_module
from exo_mesh.api.core.opening_pace import BURST_S, MAX_WAITING, SHARE, WAIT_LIMIT_S, OpeningPace
from exo_mesh.api.core.texts import TextModels
from exo_mesh.errors import ModelError, OverloadError
from tests.api.scripted_mesh import TemplatesRenderedHere
from tests.text.text_models import write_text_model


class Costs:
    """A clock, and the CPU time of jobs that each take `job_s`."""

    def __init__(self, job_s: float) -> None:
        self.now, self._job_s, self._used, self._num_reads = 1000.0, job_s, 0.0, 0

    def clock(self) -> float:
        return self.now

    def cpu(self) -> float:
        self._num_reads += 1  # before and after each job
        self._used += self._job_s if self._num_reads % 2 == 0 else 0.0
        return self._used

    def pace(self) -> OpeningPace:
        return OpeningPace(self.clock, self.cpu)


def spend(pace: OpeningPace) -> None:
    pace.timed(lambda: None)


def test_in_the_long_run_opening_takes_a_quarter_of_the_time() -> None:
    costs = Costs(2.0)
    pace, began = costs.pace(), costs.now
    for _ in range(100):
        costs.now += pace.wait_s()
        spend(pace)
    used = 100 * 2.0
    assert used == pytest.approx(BURST_S + SHARE * (costs.now - began), abs=2.0)
    costs.now += 10 * BURST_S / SHARE
    assert pace.wait_s() == 0


def test_a_failed_job_is_paid_for_too() -> None:
    pace = Costs(100.0).pace()

    def fails() -> None:
        raise ModelError("broken")

    with pytest.raises(ModelError):
        pace.timed(fails)
    assert pace.wait_s() > WAIT_LIMIT_S


async def test_a_wait_that_is_too_long_is_refused_with_the_time() -> None:
    costs = Costs(100.0)
    pace = costs.pace()
    spend(pace)
    with pytest.raises(OverloadError, match="try again in") as caught:
        async with pace.turn():
            pass
    assert caught.value.retry_after_s == pytest.approx(pace.wait_s())
    costs.now += caught.value.retry_after_s
    async with pace.turn():
        pass


async def test_models_are_opened_one_after_the_other_and_few_wait() -> None:
    pace, running, most = OpeningPace(), 0, 0

    async def open_one() -> None:
        nonlocal running, most
        async with pace.turn():
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    results = await asyncio.gather(*(open_one() for _ in range(MAX_WAITING + 5)), return_exceptions=True)
    assert most == 1
    assert sum(isinstance(one, OverloadError) for one in results) in range(1, 6)


async def test_few_large_tokenizers_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = TextModels(TemplatesRenderedHere())
    try:
        folders = [write_text_model(tmp_path / str(number)) for number in range(3)]
        size = (folders[0] / "tokenizer.json").stat().st_size
        monkeypatch.setattr(texts_module, "MAX_OPEN_BYTES", 2 * size + 1)
        first, second, third = [await texts.get(folder) for folder in folders]
        assert await texts.get(folders[2]) is third and await texts.get(folders[0]) is not first
        monkeypatch.setattr(texts_module, "MAX_OPEN_BYTES", size - 1)
        last = await texts.get(folders[1])
        assert last is not second, "it was the one used longest ago"
        assert await texts.get(folders[1]) is last, "one is kept in any case"
    finally:
        await texts.close()
