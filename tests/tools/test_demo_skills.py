"""The shipped demo model over the NumPy engine: calls of its two tools, objects, thoughts, and no needless call."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exo_mesh_numpy import provider

from exo_mesh.domain.frame import Row
from exo_mesh.text.rendering import CompiledTemplate
from exo_mesh.text.tokenizer import TextModel
from exo_mesh.weights.card import read_card
from exo_mesh.weights.store import SHIPPED
from tests.support.ring import Ring
from tools.demo_model.conversations import encode_conversation
from tools.demo_model.skills import SKILLS, skill_set
from tools.demo_model.tokenizer import build_tokenizer

DEMO = Path(str(resources.files("exo_mesh.weights") / "shipped" / SHIPPED))
LONGEST = 1024


def function(name: str, description: str, /, **properties: str) -> dict[str, Any]:
    """A tool as clients define it."""
    shapes = {key: {"type": kind, "description": f"The {key}."} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": shapes, "required": list(shapes), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


GET_WEATHER = function("get_weather", "Get the current weather in a city.", city="string")
ADD = function("add", "Add two numbers.", a="integer", b="integer")
USER = function("User", "Correctly extracted user.", name="string", age="integer")
WEATHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ADD_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 23, "b": 45}}\n</tool_call>'
PARIS = {"role": "user", "content": "What is the weather in Paris?"}


class Demo:
    """The shipped model in one stage, and its chat template."""

    def __init__(self) -> None:
        self.ring = Ring(provider, DEMO, 8, ())
        self.text = TextModel.open(DEMO)
        assert self.text.template is not None
        self.template = CompiledTemplate.compile(self.text.template.source, "shipped")
        self.ends = read_card(DEMO, "demo").eos_ids

    def logits(self, ids: list[int], start: int = 0) -> np.ndarray:
        return self.ring.forward([Row(0, start, len(ids), len(ids))], np.array(ids, np.int32))

    def answer(self, messages: list[dict[str, Any]], max_tokens: int = 60, **variables: Any) -> str:
        """What it says greedily."""
        prompt = self.text.encode_prompt(self.template.render(messages, variables=variables))
        self.ring.insert(0, max_tokens=LONGEST)
        at, said = len(prompt), []
        token = int(self.logits(prompt)[-1].argmax())
        while token not in self.ends and len(said) < max_tokens:
            said.append(token)
            token = int(self.logits([token], at)[-1].argmax())
            at += 1
        self.ring.remove(0)
        return b"".join(self.text.token_bytes(token) for token in said).decode(errors="replace")

    def says(self, ids: list[int], marks: list[bool]) -> bool:
        """Whether greedily it says what is marked: after every right part the next token is the right one."""
        self.ring.insert(0, max_tokens=LONGEST)
        best = self.logits(ids).argmax(-1)
        self.ring.remove(0)
        return all(best[i - 1] == ids[i] for i, marked in enumerate(marks) if marked)


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    made = Demo()
    yield made
    made.ring.close()


@pytest.mark.parametrize(
    ("question", "tools", "said"),
    [
        ("What is the weather in Paris?", [GET_WEATHER], WEATHER_CALL),
        ("What is the weather in Paris?", [GET_WEATHER, ADD], WEATHER_CALL),
        ("What is 23 + 45?", [GET_WEATHER, ADD], ADD_CALL),
        ("What is 23 + 45?", [GET_WEATHER], "23 + 45 = 68"),
        ("Spell robot.", [GET_WEATHER, ADD], "r-o-b-o-t"),
        (
            "Anna is 7 years old.",
            [USER],
            '<tool_call>\n{"name": "User", "arguments": {"name": "Anna", "age": 7}}\n</tool_call>',
        ),
        ("Give me JSON with name and age: Anna is 7 years old.", None, '{"name": "Anna", "age": 7}'),
    ],
)
def test_it_calls_the_tool_that_fits(demo: Demo, question: str, tools: list[dict[str, Any]] | None, said: str) -> None:
    assert demo.answer([{"role": "user", "content": question}], tools=tools) == said


def test_it_answers_from_the_result_of_the_tool(demo: Demo) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    for result, said in (("21 degrees", "21 degrees"), ('{"temperature": -3}', "-3 degrees"), ("sunny", "sunny")):
        messages = [PARIS, called, {"role": "tool", "content": result}]
        assert demo.answer(messages, tools=[GET_WEATHER]) == f"It is {said} in Paris."


def test_it_thinks_only_when_asked_to(demo: Demo) -> None:
    question = [{"role": "user", "content": "What is 23 + 45?"}]
    assert demo.answer(question, enable_thinking=False) == demo.answer(question) == "23 + 45 = 68"
    thought, end, answer = demo.answer(question, enable_thinking=True).partition("\n</think>\n\n")
    assert "20 + 40 = 60" in thought and end and answer == "23 + 45 = 68"
    assert demo.answer([PARIS], tools=[GET_WEATHER], enable_thinking=True).endswith("\n</think>\n\n" + WEATHER_CALL)


@pytest.mark.extended
@pytest.mark.parametrize("skill", SKILLS)
def test_at_least_nine_of_ten_held_out_questions_are_answered_right(demo: Demo, skill: str) -> None:
    tokenizer, size = build_tokenizer(), 30
    cases = [encode_conversation(tokenizer, one, only_last=True) for one in skill_set(skill, size, seed=3)]
    assert sum(demo.says(ids, marks) for ids, marks in cases if len(ids) <= LONGEST) >= 0.9 * size
