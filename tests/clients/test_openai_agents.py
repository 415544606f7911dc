"""What agents do with the unmodified openai package: tools, parsed answers, streamed calls, choices, completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.support.peers import MODEL

pytestmark = pytest.mark.extended

WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
PERSON: list[Any] = [{"role": "user", "content": "Make JSON: Anna is 7."}]
COUNT: list[Any] = [{"role": "user", "content": "Count from 7 to 12."}]
COUNTED = "7, 8, 9, 10, 11, 12"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


class GetWeather(BaseModel):
    """Tells the weather of a city."""

    city: str = Field(max_length=20)


TOOL: Any = pydantic_function_tool(GetWeather, name="get_weather")


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def test_a_tool_is_called_and_its_result_is_used(client: OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=WEATHER, tools=[TOOL], temperature=0).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.tool_calls
    call: Any = first.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    turns: list[Any] = [*WEATHER, first.message.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(model=MODEL, messages=turns, tools=[TOOL], temperature=0)
    assert last.choices[0].message.content == "It is 18 degrees in Paris."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_can_be_required(client: OpenAI, choice: Any) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=COUNT, tools=[TOOL], tool_choice=choice, temperature=0, max_tokens=100
    )
    calls: Any = reply.choices[0].message.tool_calls
    assert [call.function.name for call in calls][:1] == ["get_weather"]
    assert json.loads(calls[0].function.arguments).keys() == {"city"}


def test_a_call_is_streamed_in_pieces_that_the_package_puts_together(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=WEATHER, tools=[TOOL], temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert final.finish_reason == "tool_calls"
    parsed: Any = final.message.tool_calls
    assert parsed[0].function.parsed_arguments == GetWeather(city="Paris")


def test_an_answer_is_parsed_into_a_type(client: OpenAI) -> None:
    made = client.chat.completions.parse(model=MODEL, messages=PERSON, response_format=Person, temperature=0)
    assert made.choices[0].message.parsed == Person(name="Anna", age=7)


def test_thoughts_come_apart_from_the_answer(client: OpenAI) -> None:
    asked: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    reply = client.chat.completions.create(model=MODEL, messages=COUNT, temperature=0, extra_body=asked)
    message: Any = reply.choices[0].message
    assert message.content == COUNTED and message.reasoning_content
    details = reply.usage and reply.usage.completion_tokens_details
    assert details and details.reasoning_tokens and "think>" not in message.content + message.reasoning_content


def test_several_choices_are_those_of_their_seeds(client: OpenAI) -> None:
    def ask(n: int) -> list[str | None]:
        asked: Any = {"temperature": 1.5, "seed": 3, "max_tokens": 12}
        reply = client.chat.completions.create(model=MODEL, messages=COUNT, n=n, **asked)
        return [choice.message.content for choice in sorted(reply.choices, key=lambda choice: choice.index)]

    four = ask(4)
    assert four == ask(4) and four[:1] == ask(1) and len(set(four)) > 1


def test_completions_of_several_prompts_with_echo_and_logprobs(client: OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt=["one two", "three"], echo=True, logprobs=2, max_tokens=3, temperature=0
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    for choice, prompt in zip(reply.choices, ("one two", "three"), strict=True):
        assert choice.text.startswith(prompt)
        scores: Any = choice.logprobs
        assert "".join(scores.tokens) == choice.text and scores.token_logprobs[0] is None


def test_the_list_of_models_says_what_each_can_do(client: OpenAI) -> None:
    (model,) = [one for one in client.models.list() if one.id == MODEL]
    capabilities = model.model_dump()["capabilities"]
    assert capabilities["tools"]["supported"] and capabilities["thinking"]["supported"]
