"""Drafts by chance on a ring driven by hand: how many, how right, how many rows ahead, and what happens meanwhile."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from exo_mesh.domain.request import GenerateRequest, GrammarSpec, SamplingParams, ThinkingBudget
from exo_mesh.rings.runner.prefix.cache import PrefixCache
from exo_mesh.rings.runner.scheduling.pace import Pace
from tests.support.held import BALLOT, PADDED, HeldRing, NoiseEngine, ids_of
from tests.support.serving import Answers

PROMPTS = [ids_of(text) for text in ("Once upon a time", "The fox and the hare met in the wood", "A")]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}}, "required": ["name"]}
END = ids_of("</done>")


class ChancePace(Pace):
    """Lets sequences draft as chance has it."""

    def __init__(self, num_stages: int, chance: random.Random) -> None:
        super().__init__(num_stages)
        self._chance = chance

    def drafts(self, rows: int, share: float) -> tuple[int, int]:
        return self._chance.choice([1, 2, 3, 5, 9]), self._chance.choice([1, 1, 2, 4, 6])


class Oracle:
    """Knows what each request says without drafts, and is right with a probability. See DraftSource."""

    def __init__(self, text: Sequence[int], right: float, chance: random.Random) -> None:
        self._text = text
        self._right = right
        self._chance = chance

    def draft(self, tokens: Sequence[int], ahead: Sequence[int], most: int) -> tuple[list[int], int]:
        at = len(tokens) + len(ahead)
        found = list(self._text[at : at + self._chance.randint(0, most)])
        wrong = [self._chance.random() > self._right for _ in found]
        return [self._chance.randrange(PADDED) if w else one for one, w in zip(found, wrong, strict=True)], 0


def some_requests(chance: random.Random) -> list[GenerateRequest]:
    """One to four requests of different kinds."""
    kinds: list[dict[str, Any]] = [
        {"sampling": SamplingParams(temperature=0)},
        {"sampling": SamplingParams(seed=chance.randrange(99))},
        {"sampling": SamplingParams(seed=3, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.3)},
        {"sampling": SamplingParams(seed=4, repetition_penalty=1.8, repetition_window=7, top_k=40, min_p=0.01)},
        {"sampling": SamplingParams(seed=5, logprobs=2, top_p=0.9)},
        {"sampling": SamplingParams(seed=6), "grammar": GrammarSpec("json_schema", json.dumps(SCHEMA))},
        {"sampling": SamplingParams(seed=7), "grammar": GrammarSpec("regex", "(Once|The) [a-z ]{4,40}[.]")},
        {"sampling": SamplingParams(seed=8), "thinking": ThinkingBudget(END, chance.randint(0, 9))},
        {"sampling": SamplingParams(seed=9), "stop_ids": frozenset(range(0, PADDED, 29)), "min_tokens": 6},
        {"sampling": SamplingParams(seed=10), "prompt_logprobs": 1},
        {"sampling": SamplingParams(seed=11), "share_id": "choices"},
        {"sampling": SamplingParams(seed=12), "share_id": "choices"},
    ]
    made = []
    for number in range(chance.randint(1, 4)):
        fields = {"ignore_eos": False, **chance.choice(kinds)}
        prompt = PROMPTS[0] if "share_id" in fields else chance.choice(PROMPTS)
        made.append(GenerateRequest(f"r{number}", prompt, chance.randint(1, 30), **fields))
    return made


class DraftRing(HeldRing):
    """A ring that drafts by chance. texts: prompt and output of each request, by its id."""

    def __init__(self, chance: random.Random, texts: dict[str, Sequence[int]], **limits: float) -> None:
        num_stages = chance.choice([1, 2, 4])
        right = chance.choice([0.0, 0.3, 0.7, 0.9, 1.0])
        prefix = PrefixCache(num_stages) if chance.random() < 0.3 else None

        def make_source(request: GenerateRequest) -> Oracle:
            return Oracle(texts[request.request_id], right, chance)

        super().__init__(engine=NoiseEngine(), make_source=make_source, prefix=prefix, num_stages=num_stages, **limits)
        self._chance = chance
        self.engine.cuts_at_rows = prefix is None and chance.random() < 0.4
        self._let_draft()

    def _let_draft(self) -> None:
        self.driver.drafts.change(ChancePace(self.limits.num_stages, self._chance))
        self.driver.drafts.cuts_back = self._chance.choice([1, 4, 31])
        self.driver.drafts.cuts_at_rows = self.engine.cuts_at_rows

    def lose(self) -> None:
        """All stages are replaced, with every frame on its way."""
        self.sent.clear()
        self.engine.kv.clear()
        self.driver.change(BALLOT, self.limits, self.limits.num_stages)
        self._let_draft()


def said(answers: Answers) -> list[tuple[Any, ...]]:
    """All that a caller has received of the output, without the prompt tokens that came from a cache."""
    return [
        (
            event.index,
            event.token_id if event.HasField("token_id") else None,
            event.logprob if event.HasField("logprob") else None,
            [(top.token_id, top.logprob) for top in event.top],
            event.finish,
        )
        for event in answers.events
    ]


def alone(request: GenerateRequest) -> tuple[list[tuple[Any, ...]], list[int]]:
    """What a request says without drafts and without others, and its token ids."""
    answers = HeldRing().ask(replace(request, share_id=""))
    return said(answers), [event.token_id for event in answers.events if event.HasField("token_id")]


def play(seed: int) -> tuple[list[Any], list[Any], DraftRing]:
    """What the requests of this seed say alone, what they say with drafts, and the ring afterwards."""
    chance = random.Random(seed)
    requests = some_requests(chance)
    expected, texts = [], {}
    for request in requests:
        what, token_ids = alone(request)
        expected.append(what)
        texts[request.request_id] = [*request.prompt_ids, *token_ids]
    limits = {"max_tokens": chance.choice([40, 80, 2**31]), "max_rows": chance.choice([1, 2, 32])}
    ring = DraftRing(chance, texts, **limits)
    answers = []
    for request in requests:
        answers.append(ring.submit(request))
        for _ in range(chance.choice([0, 0, 1, 3, 9])):
            _turn(ring)
    loses_at = chance.choice([0, 0, 5, 11])
    for turn in range(10_000):
        if all(one.ended for one in answers):
            break
        if turn + 1 == loses_at:
            ring.lose()
        _turn(ring)
    ring.run(*answers)
    return expected, [said(one) for one in answers], ring


def _turn(ring: DraftRing) -> None:
    if ring.sent or ring.driver.num_running or ring.driver.num_waiting:
        ring.step()
