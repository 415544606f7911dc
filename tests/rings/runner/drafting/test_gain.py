"""What drafts gain and never cost, on a ring with a made-up clock, under the real scheduler and its real decisions."""

from __future__ import annotations

import pytest

from exo_mesh.rings.runner.scheduling.sequence import Sequence, Work
from tests.rings.runner.ring_model import DraftingModel

STAGES, STEP_S, HOP_S = 4, 0.010, 0.0002
PROMPT = [5] * 4


def speed(streams: int, right: float, token_s: float, hop_s: float = HOP_S, *, drafts: bool = True) -> float:
    """Tokens a second of the second answers, when the ring has been measured."""

    def cost(work: Work) -> float:
        return STEP_S + (0.0 if work.is_prefill else token_s * (len(work.token_ids) - len(work.rows)))

    ring = DraftingModel([cost] * STAGES, hop_s, right)
    if not drafts:
        ring.scheduler.drafter = None
    for number in range(streams):
        ring.submit(Sequence(100 + number, list(PROMPT)), 100)
    ring.run()
    began = ring.now
    for number in range(streams):
        ring.submit(Sequence(1 + number, list(PROMPT)), 300)
    ring.run()
    return streams * 300 / (ring.now - began)


def gain(streams: int, right: float, token_s: float = 0.002, hop_s: float = HOP_S) -> float:
    return speed(streams, right, token_s, hop_s) / speed(streams, right, token_s, hop_s, drafts=False)


@pytest.mark.parametrize(("right", "least"), [(0.95, 4.0), (0.8, 2.3), (0.6, 1.5), (0.3, 0.98)])
def test_one_stream_gains_what_chains_of_drafts_promise(right: float, least: float) -> None:
    assert gain(1, right) >= least


def test_dear_tokens_and_slow_links_change_the_choice_and_keep_the_gain() -> None:
    assert gain(1, 0.8, token_s=0.005) >= 2.0
    assert gain(1, 0.8, hop_s=0.020) >= 3.2


@pytest.mark.extended
@pytest.mark.parametrize("streams", [8, 16])
@pytest.mark.parametrize("right", [0.95, 0.6, 0.3])
@pytest.mark.parametrize("token_s", [0.002, 0.005])
def test_many_streams_lose_nothing(streams: int, right: float, token_s: float) -> None:
    assert gain(streams, right, token_s) >= 0.98
