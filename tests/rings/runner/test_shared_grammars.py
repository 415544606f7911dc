"""Choices that a grammar holds share a prefill, also where tokens that must come are known before it is done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from exo_mesh.domain.request import GenerateRequest, GrammarSpec, SamplingParams
from exo_mesh.engine.contract import StageInput, StageOutput, copy_defect
from exo_mesh.errors import EngineError
from exo_mesh.rings.runner.stage import Stage
from exo_mesh.rings.serving.choices import fan_out
from tests.support.held import PADDED, PATIENCE_S, WOKEN, HeldRing, NoiseEngine, ids_of

PROMPT = ids_of("Tell me of the fox and of the dog, and count them.")


class CopyingNoise(NoiseEngine):
    def forward(self, stage_input: StageInput) -> StageOutput:
        start, logits = 0, []
        for row in stage_input.rows:
            held = self.kv[row.sequence]
            held[row.pos0 :] = stage_input.token_ids[start : start + row.n]
            start += row.n
            logits += [self.logits(held[:stop]) for stop in range(len(held) - row.num_logits + 1, len(held) + 1)]
        return StageOutput(logits=np.array(logits, np.float32).reshape(-1, PADDED))

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        held = self.kv.get(source)
        if (defect := copy_defect(source, None if held is None else len(held), upto, max_tokens)) or held is None:
            raise EngineError(defect)
        self.kv[sequence] = held[:upto]


def ring() -> HeldRing:
    made = HeldRing(prefill_chunk=8)
    made.engine = CopyingNoise()
    made.stage = Stage(made.engine, 0)  # type: ignore[arg-type]
    return made


SPECS = [
    GrammarSpec("regex", "The quick brown fox jumps over [0-9]{3} dogs"),
    GrammarSpec("regex", "[a-z]{5}"),
    GrammarSpec("choice", '["yes", "no", "perhaps"]'),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text[:9])
@pytest.mark.parametrize("max_tokens", [200, 0])
def test_each_choice_is_what_it_is_alone(spec: GrammarSpec, max_tokens: int) -> None:
    request = GenerateRequest("r", PROMPT, max_tokens, SamplingParams(seed=5), grammar=spec)
    choices = fan_out(request, 4)
    alone = [ring().ask(replace(one, share_id="")) for one in choices]
    together = ring()
    answers = [together.submit(one) for one in choices]
    together.run(*answers)
    assert [one.events for one in answers] == [one.events for one in alone]
    assert all(one.ended and not one.error for one in answers)
    assert together.driver.beginnings.shared.saved_tokens == (3 * (len(PROMPT) - 1) if max_tokens else 0)
    assert not together.engine.kv


@pytest.mark.parametrize("spec", [*SPECS, GrammarSpec("choice", '["yes"]')], ids=lambda spec: spec.text[:9])
def test_what_is_wanted_of_the_prompt_comes_first(spec: GrammarSpec) -> None:
    """Also where all of the answer is known at once."""
    request = GenerateRequest("r", PROMPT, 50, SamplingParams(seed=5), grammar=spec)
    scored = ring().ask(replace(request, prompt_logprobs=0))
    assert [token.index for message in scored.messages for token in message.prompt] == list(range(1, len(PROMPT)))
    first = next(index for index, message in enumerate(scored.messages) if message.events)
    assert not any(message.prompt for message in scored.messages[first:])
    assert scored.tokens == ring().ask(request).tokens


def test_news_that_a_grammar_is_ready_may_come_after_the_output_has_begun() -> None:
    request = GenerateRequest("r", PROMPT, 50, SamplingParams(seed=5), grammar=SPECS[0])
    late = ring()
    answers = late.submit(request)
    (generation,) = late.driver._live.values()
    while not generation.sequence.decoding:
        result = late.stage.process(late.sent.popleft())
        late.driver.returned(result.frame, result.logits)
    while not generation.constrained:
        WOKEN.get(timeout=PATIENCE_S)()
    assert generation.forced, "they wait for the row on its way"
    late.driver.outputs._begin_output(generation)
    late.run(answers)
    assert answers.tokens == ring().ask(request).tokens
