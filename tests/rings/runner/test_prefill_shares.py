"""Who gets how much of a chunk of prefill: a long prompt neither holds up short ones, nor is it held up by them."""

from __future__ import annotations

import pytest

from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.scheduling.pace import Pace
from exo_mesh.rings.runner.scheduling.scheduler import Scheduler
from exo_mesh.rings.runner.scheduling.sequence import Sequence

CHUNK = 512


def scheduler(*prompts: int) -> Scheduler:
    """Of a ring of one stage that takes a microsecond for a token, with sequences 0, 1, … of these lengths."""
    pace = Pace(1)
    pace.prefilled(CHUNK, CHUNK * 1e-6, 0.0)
    made = Scheduler(SchedulerLimits(1, prefill_chunk=CHUNK), pace)
    for number, length in enumerate(prompts):
        assert made.submit(Sequence(number, list(range(length + 1))))  # the last token is decoded, not prefilled
    assert len(list(made.admit())) == len(prompts)
    return made


def next_chunk(made: Scheduler) -> dict[int, int]:
    """Tokens by sequence of the next chunk, which then comes round."""
    work = made.next_work()
    assert work is not None and work.is_prefill
    made.came_round(work)
    return {row.sequence: row.n for row in work.rows}


@pytest.mark.parametrize(
    ("prompts", "chunk"),
    [
        pytest.param([3000], {0: 512}, id="alone it gets all"),
        pytest.param([3000, 5], {0: 507, 1: 5}, id="a short one goes along at once"),
        pytest.param([3000, 2000, 300], {0: 256, 2: 256}, id="half for the first, half for the shortest"),
        pytest.param([3000, 2000, 100], {0: 256, 1: 156, 2: 100}, id="what the shortest leaves is for the next"),
        pytest.param([40, 3000], {0: 40, 1: 472}, id="what the first leaves is for the others"),
        pytest.param([3000, 3000], {0: 256, 1: 256}, id="equal ones share"),
        pytest.param([10, 20, 30], {0: 10, 1: 20, 2: 30}, id="all that fit go together"),
        pytest.param([250, 250, 300], {0: 250, 1: 250}, id="none begins with the few tokens that are left"),
        pytest.param([3000, 250, 300], {0: 262, 1: 250}, id="the first takes them"),
    ],
)
def test_shares_of_a_chunk(prompts: list[int], chunk: dict[int, int]) -> None:
    assert next_chunk(scheduler(*prompts)) == chunk


def test_who_came_first_gets_half_of_each_chunk_however_many_short_ones_come() -> None:
    made = scheduler(16 * CHUNK)
    left = {0: 16 * CHUNK}
    for number in range(1, 400):
        if made.num_running < 20:
            assert made.submit(Sequence(number, list(range(101))))
            left[number] = 100
            list(made.admit())
            continue
        chunk = next_chunk(made)
        assert sum(chunk.values()) == CHUNK and chunk[0] >= CHUNK // 2
        for name, tokens in chunk.items():
            left[name] -= tokens
            if not left[name]:
                made.remove(name)
        if left[0] < CHUNK:
            return
    raise AssertionError(f"{left[0]} tokens of the first are left")


@pytest.mark.parametrize(("seconds_a_token", "size"), [(1e-5, 512), (0.004, 192), (0.1, 16)])
def test_where_nobody_streams_a_chunk_takes_a_second_at_most_if_it_can(seconds_a_token: float, size: int) -> None:
    """So that whoever comes meanwhile does not wait for long."""
    made = scheduler(3000)
    for tokens in (64, 512):
        for _ in range(100):
            made.pace.prefilled(tokens, tokens * seconds_a_token, 0.0)
    assert next_chunk(made) == {0: size}
