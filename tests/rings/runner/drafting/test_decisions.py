"""What is known of guesses, when drafts are sent, and that a drafter ends no request."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from exo_mesh.domain.request import GenerateRequest, GrammarSpec, SamplingParams
from exo_mesh.rings.runner.drafting.acceptance import FIRST, Acceptance, kind_of
from exo_mesh.rings.runner.drafting.worth import DRAFT_TOKENS, PLAIN_TOKENS, TRY_OTHER, Worth
from exo_mesh.rings.runner.scheduling.decode_rows import MOST_DRAFTED
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.scheduling.pace import Pace
from exo_mesh.rings.runner.scheduling.scheduler import Scheduler
from exo_mesh.rings.runner.scheduling.sequence import Sequence as Ring
from tests.support.drafting import ChancePace, Oracle, alone, said
from tests.support.held import PADDED, PATIENCE_S, WOKEN, HeldRing, ids_of

REQUEST = GenerateRequest("r", ids_of("Once upon a time"), 40, SamplingParams(seed=1), ignore_eos=True)


def test_the_share_of_right_guesses_is_learnt_by_kind_and_over_requests() -> None:
    everybody = Acceptance()
    mine = Acceptance(everybody)
    for _ in range(100):
        mine.note(kind_of(20), is_right=True)
        mine.note(kind_of(3), is_right=False)
    assert mine.share(kind_of(20)) > 0.9 and mine.share(kind_of(3)) < 0.05
    another = Acceptance(everybody)
    assert another.share(kind_of(20)) > FIRST[kind_of(20)] and another.share(kind_of(3)) < FIRST[kind_of(3)]
    assert another.share(kind_of(0)) < FIRST[0], "what nobody has judged counts less, not more"


def _windows(worth: Worth, plain_s: float, drafting_s: float, count: int) -> list[bool]:
    """Whether drafts were allowed in each window. plain_s, drafting_s: seconds of a token."""
    now, allowed = 0.0, []
    worth.note(now, 1, 1, drafted=False)
    for _ in range(count):
        drafts = worth.may_draft
        allowed.append(drafts)
        for _ in range(DRAFT_TOKENS if drafts else PLAIN_TOKENS):
            now += drafting_s if drafts else plain_s
            worth.note(now, 1, 1, drafted=drafts)
    return allowed


def test_the_slower_way_is_left_and_tried_again() -> None:
    loses = _windows(Worth(), plain_s=0.01, drafting_s=0.02, count=50)
    assert loses[:2] == [True, False] and sum(loses) <= 2 + 50 // TRY_OTHER
    assert any(loses[2:]), "it may pay later"
    gains = _windows(Worth(), plain_s=0.02, drafting_s=0.01, count=50)
    assert sum(gains) >= 50 - 2 - 50 // TRY_OTHER and not all(gains)


def test_frames_without_drafts_say_how_fast_the_ring_is_without_them() -> None:
    worth = Worth()
    now = 0.0
    for _ in range(10 * DRAFT_TOKENS):
        now += 0.01
        worth.note(now, 1, 1, drafted=False)
    assert worth.may_draft and worth._speeds[1].plain == pytest.approx(100) and not worth._speeds[1].drafting


def test_nothing_is_drafted_before_a_lap_is_known_and_little_at_first() -> None:
    pace = Pace(2)
    assert pace.drafts(1, 0.95) == (1, 1)
    for _ in range(10):
        pace.decoded(1, 0.02, [0.01, 0.01], 0.0)
    assert pace.drafts(1, 0.95)[0] <= 2, "the cost of further tokens is not known"
    for _ in range(5):
        pace.drafted(1, 2, [0.0101, 0.0101])
    assert pace.drafts(1, 0.95)[0] > 2
    for _ in range(200):
        pace.drafted(1, 2, [0.03, 0.03])
    assert pace.drafts(1, 0.3)[0] == 1, "dear tokens that are seldom right"


class Failing:
    def draft(self, tokens: Sequence[int], ahead: Sequence[int], most: int) -> tuple[list[int], int]:
        raise RuntimeError("no guess")


def test_a_drafter_that_fails_ends_no_request() -> None:
    ring = HeldRing(make_source=lambda _: Failing())
    ring.driver.drafts.cuts_back = 31
    assert said(ring.ask(REQUEST)) == alone(REQUEST)[0]


@pytest.mark.parametrize(("drafts", "cuts_back"), [(False, 31), (True, 0)])
def test_a_request_that_wants_none_and_a_stage_that_cannot_cut_back_get_no_drafts(drafts: bool, cuts_back: int) -> None:
    expected, ids = alone(REQUEST)
    oracle = Oracle([*REQUEST.prompt_ids, *ids], 1.0, random.Random(1))
    ring = HeldRing(make_source=lambda _: oracle)
    ring.driver.drafts.change(ChancePace(1, random.Random(1)))
    ring.driver.drafts.cuts_back = cuts_back
    assert said(ring.ask(replace(REQUEST, drafts=drafts))) == expected
    assert max(ring.rows[1:]) == 1 and not sum(ring.driver.drafts.tally.accepted)


class Nonsense:
    def draft(self, tokens: Sequence[int], ahead: Sequence[int], most: int) -> tuple[list[int], int]:
        return [PADDED, PADDED + 1, 10**9][:most], 0


def test_no_token_is_drafted_that_the_model_does_not_have() -> None:
    ring = HeldRing(make_source=lambda _: Nonsense())
    ring.driver.drafts.change(ChancePace(1, random.Random(1)))
    ring.driver.drafts.cuts_back = 31
    assert said(ring.ask(REQUEST)) == alone(REQUEST)[0] and max(ring.rows[1:]) == 1


def test_right_guesses_save_laps_and_the_last_event_counts_them() -> None:
    _, ids = alone(REQUEST)
    oracle = Oracle([*REQUEST.prompt_ids, *ids], 1.0, random.Random(1))
    ring = HeldRing(make_source=lambda _: oracle)
    ring.driver.drafts.change(ChancePace(1, random.Random(1)))
    ring.driver.drafts.cuts_back = 31
    answers = ring.ask(REQUEST)
    last = answers.events[-1]
    assert ring.laps < 30 and last.accepted == 40 - ring.laps == sum(ring.driver.drafts.tally.accepted)


def test_guesses_that_a_grammar_forbids_are_not_sent_and_others_save_laps() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "minLength": 30, "maxLength": 60}}}
    request = replace(REQUEST, max_tokens=100, grammar=GrammarSpec("json_schema", json.dumps(schema)), ignore_eos=False)
    expected, ids = alone(request)
    laps = {}
    for right in (1.0, 0.0):
        oracle = Oracle([*request.prompt_ids, *ids], right, random.Random(1))
        ring = HeldRing(make_source=lambda _, oracle=oracle: oracle)  # type: ignore[misc]
        ring.driver.drafts.change(ChancePace(1, random.Random(1)))
        ring.driver.drafts.cuts_back = 31
        assert said(ring.ask(request)) == expected
        laps[right] = ring.laps
    assert laps[1.0] < 0.7 * laps[0.0]


class Eager:
    """Wants to draft as much as it may."""

    cuts_at_rows = False

    def propose(self, sequence: Ring, num_decoding: int, most: int) -> list[int]:
        return [7] * most


def test_the_logits_of_a_frame_are_bounded_however_many_rows_draft() -> None:
    scheduler = Scheduler(SchedulerLimits(1, max_rows=16), Pace(1))
    scheduler.drafter = Eager()
    for number in range(16):
        scheduler.submit(Ring(number + 1, [1, 2]))
    list(scheduler.admit())
    while (work := scheduler.next_work()) is not None and work.is_prefill:
        scheduler.came_round(work)
    assert work is not None and len(work.rows) == 16
    assert sum(row.num_logits for row in work.rows) <= 16 + MOST_DRAFTED
    assert all(row.num_logits > 1 for row in work.rows)


def test_rows_that_wait_behind_the_last_token_of_an_answer_are_not_drawn_from() -> None:
    request = replace(REQUEST, max_tokens=2, grammar=GrammarSpec("regex", "[a-z]{9}"), ignore_eos=False)
    ring = HeldRing()
    answers = ring.submit(request)
    (generation,) = ring.driver._live.values()
    while generation.index < 1:
        ring.step()
    last = len(generation.sequence.tokens) - 1
    logits = ring.engine.logits(generation.sequence.tokens)[None]
    generation.late += [(last, logits), (last + 1, logits)]
    while generation.constraint is not None and not generation.constraint.is_ready:
        WOKEN.get(timeout=PATIENCE_S)
    ring.driver.outputs._draw_late(generation)
    ring.driver.callers.deliver()
    assert answers.ended and len(answers.tokens) == 2
