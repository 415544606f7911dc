"""An output is held to its grammar and its thinking budget, and the outputs beside it are what they are without."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain.request import GenerateRequest, GrammarSpec, SamplingParams, ThinkingBudget
from exo_mesh.rings.runner.grammars import Grammars
from exo_mesh.rings.runner.thoughts import ThoughtLimit
from tests.support.held import BALLOT, MODEL_DIR, WOKEN, HeldRing, ids_of, text_of

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
PROMPT = ids_of("Once upon a time")
END = ids_of("</done>")
"""Several tokens, while `</think>` is one of the demo model, which a grammar can only name as such."""


def asked(name: str = "r", tokens: int = 200, **fields: Any) -> GenerateRequest:
    sampling = fields.pop("sampling", SamplingParams(seed=5))
    return GenerateRequest(name, PROMPT, tokens, sampling, **fields)


def schema(value: Any = SCHEMA) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def test_an_output_is_held_to_a_schema_and_ends_where_it_is_complete() -> None:
    ring = HeldRing()
    answers = ring.ask(asked(grammar=schema()))
    value = json.loads(text_of(answers))
    assert set(value) == {"name", "size"} and len(value["name"]) <= 8
    assert answers.events[-1].finish == "stop" and not answers.events[-1].HasField("token_id")
    assert [event.index for event in answers.events] == list(range(len(answers.events)))
    assert not ring.engine.kv


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (GrammarSpec("regex", "[0-9]{3}-[a-f]{2}"), r"\d{3}-[a-f]{2}"),
        (GrammarSpec("choice", '["yes", "perhaps", "no"]'), "yes|perhaps|no"),
        (GrammarSpec("lark", 'start: "<" x{2,3} ">"\nx: "ab" | "cd"'), "<(ab|cd){2,3}>"),
    ],
    ids=lambda value: value.kind if isinstance(value, GrammarSpec) else "",
)
def test_each_kind_of_grammar_holds(spec: GrammarSpec, pattern: str) -> None:
    for seed in range(3):
        answers = HeldRing().ask(asked(grammar=spec, sampling=SamplingParams(seed=seed)))
        assert re.fullmatch(pattern, text_of(answers))


def test_tokens_that_must_come_take_no_lap_of_their_own() -> None:
    spec = GrammarSpec("regex", "The quick brown fox says [ab] and jumps over the lazy dog [cd]")
    ring = HeldRing()
    answers = ring.ask(asked(grammar=spec))
    num_tokens = len(answers.tokens) - 1
    assert re.fullmatch(spec.text, text_of(answers))
    assert ring.driver.outputs.laps_saved >= num_tokens - 4
    assert ring.laps <= 6, "of the prompt, of what is drawn, and of what is more than a row has room for"
    assert max(ring.rows) > 1 and ring.driver.outputs.tokens == num_tokens
    slow = HeldRing()
    one_by_one = slow.ask(asked(grammar=spec, sampling=SamplingParams(seed=5, logprobs=2)))
    assert slow.driver.outputs.laps_saved == 0
    assert all(event.HasField("logprob") for event in one_by_one.events[:-1])
    assert re.fullmatch(spec.text, text_of(one_by_one))


def test_rows_without_a_grammar_are_what_they_are_alone() -> None:
    free = [replace(asked(f"free{i}", 30, ignore_eos=True), sampling=SamplingParams(seed=i)) for i in range(16)]
    alone = [HeldRing().ask(request).tokens for request in free]
    held = []
    for i in range(16):
        value = {"type": "object", "properties": {f"key{i}": {"type": "integer", "minimum": i, "maximum": i + 50}}}
        held.append(asked(f"held{i}", 60, grammar=schema({**value, "required": [f"key{i}"]})))
    ring = HeldRing()
    answers = [ring.submit(request) for pair in zip(free, held, strict=True) for request in pair]
    ring.run(*answers)
    assert [one.tokens for one in answers[::2]] == alone
    for i, one in enumerate(answers[1::2]):
        if one.events[-1].finish == "stop":
            assert i <= json.loads(text_of(one))[f"key{i}"] <= i + 50


@pytest.mark.parametrize("sampling", [SamplingParams(seed=3), SamplingParams(temperature=0)], ids=["drawn", "greedy"])
def test_an_answer_that_resumes_after_any_message_is_the_same(sampling: SamplingParams) -> None:
    request = asked(grammar=schema(), sampling=sampling)
    whole = HeldRing().ask(request)
    ids = [event.token_id for event in whole.events if event.HasField("token_id")]
    cuts, at = [], 0
    for message in whole.messages:
        at += sum(event.HasField("token_id") for event in message.events)
        cuts.append(at)
    for cut in sorted(set(cuts))[::4]:
        again = HeldRing().ask(replace(request, resume_ids=tuple(ids[:cut]), resumed=True))
        assert [event.token_id for event in again.events if event.HasField("token_id")] == ids[cut:]
        assert again.events[-1].finish == "stop"


def test_a_plan_that_changes_in_the_middle_changes_nothing() -> None:
    request = asked(grammar=schema())
    whole = HeldRing().ask(request)
    for number in range(1, 12, 3):
        ring = HeldRing()
        answers = ring.submit(request)
        for _ in range(number):
            if not answers.ended:
                ring.step()
        ring.sent.clear()
        ring.engine.kv.clear()
        ring.driver.change(BALLOT, ring.limits, 1)
        ring.run(answers)
        assert text_of(answers) == text_of(whole)


def test_a_grammar_that_may_end_ends_with_a_stop_id_and_not_before_min_tokens() -> None:
    (stop,) = ids_of("a")
    spec = GrammarSpec("regex", "[b-z]+")
    ring = HeldRing()
    ring.engine.favourites[stop] = 50.0
    answers = ring.ask(asked(grammar=spec, stop_ids=frozenset({stop}), min_tokens=5))
    assert len(answers.tokens) == 6 and answers.events[-1].finish == "stop"
    assert re.fullmatch("[b-z]+", text_of(answers))
    ignoring = ring.ask(asked("i", 12, grammar=spec, stop_ids=frozenset({stop}), ignore_eos=True))
    assert len(ignoring.tokens) == 12 and ignoring.events[-1].finish == "length"
    ends = ring.ask(asked("e", 12, grammar=GrammarSpec("regex", "xyz"), ignore_eos=True, min_tokens=9))
    assert text_of(ends) == "xyz" and ends.events[-1].finish == "stop"


def test_a_bias_moves_only_what_the_grammar_allows() -> None:
    yes, no, other = ids_of("yes"), ids_of("no"), ids_of("zebra")
    bias = ((no[0], 90.0), (other[0], 100.0), (yes[0], -100.0))
    sampling = SamplingParams(seed=1, logit_bias=bias, repetition_penalty=1.3, presence_penalty=1.0)
    answers = HeldRing().ask(asked(grammar=GrammarSpec("choice", '["yes", "no"]'), sampling=sampling))
    assert text_of(answers) == "no"


def test_output_that_is_cut_by_its_length_says_so() -> None:
    answers = HeldRing().ask(asked(tokens=4, grammar=GrammarSpec("regex", "The quick brown fox jumps")))
    assert len(answers.tokens) == 4 and answers.events[-1].finish == "length"


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (GrammarSpec("json_schema", '{"not": {}}'), "invalid_request"),
        (GrammarSpec("lark", "start: nothing"), "invalid_request"),
        (GrammarSpec("regex", ".*a.{40}b.*c.{40}d"), "invalid_request"),
    ],
)
def test_a_grammar_that_fails_ends_its_own_request_only(spec: GrammarSpec, code: str) -> None:
    ring = HeldRing()
    beside, failing = ring.submit(asked("beside", 40)), ring.submit(asked("failing", grammar=spec))
    ring.run(beside, failing)
    assert failing.error == code or failing.ended
    assert beside.events[-1].finish and not beside.error
    assert not ring.engine.kv


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    assert HeldRing(tmp_path).ask(asked(grammar=schema())).error == "model_unusable"


def test_a_request_that_is_cancelled_while_its_grammar_compiles_is_gone() -> None:
    ring = HeldRing()
    answers = ring.submit(asked(grammar=schema()))
    ring.driver.cancel("r", answers)
    after = ring.ask(asked("after", grammar=schema()))
    assert json.loads(text_of(after))
    assert answers.error == "cancelled"


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_thought_ends_when_its_budget_is_used_up(budget: int, logprobs: int | None) -> None:
    sampling = SamplingParams(seed=2, logprobs=logprobs)
    ring = HeldRing()
    answers = ring.ask(asked(tokens=40, sampling=sampling, ignore_eos=True, thinking=ThinkingBudget(END, budget)))
    assert tuple(answers.tokens[budget : budget + len(END)]) == END
    assert len(answers.tokens) == 40
    assert ring.driver.outputs.laps_saved == (len(END) if logprobs is None else 0)


def test_a_budget_and_a_grammar_hold_together() -> None:
    spec = GrammarSpec("lark", 'start: /[a-z ]*/ "</done>" /[0-9]{4}/')
    answers = HeldRing().ask(asked(grammar=spec, thinking=ThinkingBudget(END, 6)))
    assert re.fullmatch("[a-z ]*</done>[0-9]{4}", text_of(answers))
    assert any(tuple(answers.tokens[i : i + len(END)]) == END for i in range(8))
    no_marker = HeldRing().ask(asked(grammar=GrammarSpec("regex", "[0-9]{9}"), thinking=ThinkingBudget(END, 1)))
    assert re.fullmatch("[0-9]{9}", text_of(no_marker))


def test_a_thought_is_limited_alike_wherever_its_output_resumes() -> None:
    budget = ThinkingBudget((7, 8, 9), 3, start_ids=(1, 2))
    output = [5, 1, 2, 4, 7, 7, 8, 9, 4, 4, 4, 4, 1, 2, 4]
    said = [ThoughtLimit(budget, output[:n]).forced() for n in range(len(output) + 1)]
    assert said[5:8] == [(), (8, 9), (9,)] or said[6] == (8, 9)
    assert said[8] == () and said[-2:] == [(7, 8, 9), (7, 8, 9)]
    limit = ThoughtLimit(budget, ())
    for (before, after), token_id in zip(pairwise(said), output, strict=True):
        assert limit.forced() == before
        limit.add(token_id)
        assert limit.forced() == after


@pytest.mark.parametrize("start", ["", "The answer which they all begin with is: "])
def test_choices_that_share_a_prompt_have_each_their_own_matcher(start: str) -> None:
    spec = GrammarSpec("regex", f"{start}[a-z]{{4}}[0-9]{{3}}")
    alone = [HeldRing().ask(asked(grammar=spec, sampling=SamplingParams(seed=i))).tokens for i in range(4)]
    ring = HeldRing(prefill_chunk=3)
    choices = [asked(f"c{i}", grammar=spec, sampling=SamplingParams(seed=i), share_id="all") for i in range(4)]
    answers = [ring.submit(choice) for choice in choices]
    ring.run(*answers)
    assert [one.tokens for one in answers] == alone


def test_a_waiting_request_holds_no_compiled_grammar() -> None:
    ring = HeldRing(max_running=1)
    first = ring.submit(asked("first", 30, ignore_eos=True))
    waiting = [ring.submit(asked(f"r{number}", grammar=schema())) for number in range(5)]
    ring.step()
    held = [one.constraint for one in ring.driver._live.values() if one.request.grammar is not None]
    assert len(held) == 5 and not any(held)
    ring.run(first, *waiting)
    assert all(json.loads(text_of(answers)) for answers in waiting)


def test_a_grammar_without_the_required_beginning_is_refused_by_name() -> None:
    answers = HeldRing().ask(asked(grammar=GrammarSpec("lark", 'start: "no"'), begins_with="yes"))
    assert answers.error == "invalid_request"
    assert answers.messages[-1].error_message == "no allowed token continues the required beginning of the output"


def test_a_grammar_that_failed_is_not_compiled_again_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    ring = HeldRing(grammars=Grammars(MODEL_DIR, WOKEN.put))
    made: list[Any] = []
    compile_one = llguidance.LLMatcher

    def noted(*args: Any, **given: Any) -> Any:
        made.append(args)
        return compile_one(*args, **given)

    monkeypatch.setattr(llguidance, "LLMatcher", noted)
    for name in ("a", "b"):
        answers = ring.ask(asked(name, grammar=GrammarSpec("lark", 'start: "unfinished')))
        assert answers.error == "invalid_request"
    assert len(made) == 1
