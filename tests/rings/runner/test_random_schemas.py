"""Whatever a model says, held to a schema it says what validates."""

from __future__ import annotations

import json
import random

import pytest
from jsonschema import Draft202012Validator

from exo_mesh.domain.request import GenerateRequest, GrammarSpec, SamplingParams
from tests.support.held import HeldRing, ids_of, text_of
from tests.support.schemas import random_schema

AT_ONCE = 16
PROMPT = ids_of("Say it in JSON:")


@pytest.mark.parametrize(
    "number", [24, pytest.param(200, marks=pytest.mark.extended), pytest.param(1000, marks=pytest.mark.slow)]
)
def test_random_schemas_are_filled_in_by_noise(number: int) -> None:
    ring = HeldRing(max_waiting=AT_ONCE)
    finished, schemas = 0, [random_schema(random.Random(i)) for i in range(number)]
    for start in range(0, number, AT_ONCE):
        asked = []
        for i, schema in enumerate(schemas[start : start + AT_ONCE], start):
            grammar = GrammarSpec("json_schema", json.dumps(schema))
            sampling = SamplingParams(seed=i, temperature=0.0 if i % 3 == 0 else 1.0)
            asked.append((schema, ring.submit(GenerateRequest(f"r{i}", PROMPT, 300, sampling, grammar=grammar))))
        ring.run(*(answers for _, answers in asked))
        for schema, answers in asked:
            assert not answers.error, (schema, answers.messages[-1])
            if answers.events[-1].finish == "stop":
                finished += 1
                Draft202012Validator(schema).validate(json.loads(text_of(answers)))
    assert finished >= 0.9 * number
