"""Anthropic's client: messages, streams, tools, schemas, thinking, counting, errors, models. Arguments: URL MODEL.

Prints one JSON object. `unknown`: fields of replies that the package's types do not have.
"""

import json
import sys

import anthropic
from anthropic import Anthropic
from anthropic.types import ErrorResponse, Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage
from common import COUNT, PERSON, TOOL, WEATHER
from pydantic import BaseModel, Field, TypeAdapter

url, model = sys.argv[1:]
client = Anthropic(base_url=url, api_key="unused", max_retries=0)
function = TOOL["function"]
tool = {
    "name": function["name"],
    "description": function["description"],
    "input_schema": function["parameters"],
    "cache_control": {"type": "ephemeral"},
}
greedy = {"temperature": 0}
asked = {"model": model, "max_tokens": 60, "extra_body": greedy}
count = {**asked, "messages": [{"role": "user", "content": COUNT}]}
weather = {**asked, "messages": [{"role": "user", "content": [{"type": "text", "text": WEATHER}]}], "tools": [tool]}
unknown = set()
event_type = TypeAdapter(RawMessageStreamEvent)


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def strict(value):
    """Note the unknown fields of a validated reply."""
    if isinstance(value, BaseModel):
        unknown.update(value.model_extra or {})
        for name in type(value).model_fields:
            strict(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            strict(one)


def validated(kind, text):
    value = kind.model_validate_json(text, strict=True)
    strict(value)
    return value


def raw_events(**fields):
    """The types of all events of a stream, each validated."""
    kinds = []
    with client.messages.with_streaming_response.create(stream=True, **fields) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: ") and '"ping"' not in line:
                event = event_type.validate_json(line[6:], strict=True)
                strict(event)
                kinds.append(event.type)
    return kinds


def error_of(**fields):
    try:
        client.messages.create(**{**count, **fields})
    except anthropic.APIStatusError as exc:
        body = validated(ErrorResponse, exc.response.text)
        return [type(exc).__name__, body.error.type, body.request_id == exc.request_id]
    return None


def sizes(usage):
    """Tokens of the prompt, of which an earlier request may have left a part in the cache, and of the answer."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens


seen = {}
whole = validated(Message, client.messages.with_raw_response.create(**count).text())
seen["chat"] = [whole.content[0].text, whole.stop_reason]
with client.messages.stream(**count) as stream:
    text = "".join(stream.text_stream)
    seen["streamed"] = [text, sizes(stream.get_final_message().usage) == sizes(whole.usage)]
seen["events"] = raw_events(**count)
stopped = client.messages.create(stop_sequences=["10"], **count)
seen["stopped"] = [stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence]
counted = client.messages.with_raw_response.count_tokens(model=model, messages=count["messages"])
seen["counted"] = validated(MessageTokensCount, counted.text()).input_tokens == sizes(whole.usage)[0]

with client.messages.stream(tool_choice={"type": "any"}, **weather) as stream:
    called = stream.get_final_message()
call = called.content[-1]
seen["call"] = [call.name, call.input, called.stop_reason]
validated(Message, client.messages.with_raw_response.create(tool_choice={"type": "any"}, **weather).text())
seen["call events"] = sorted(set(raw_events(tool_choice={"type": "any"}, **weather)))
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "18 degrees in Paris"}]}
history = [*weather["messages"], called.to_param(), {"role": "user", "content": [result]}]
seen["answer"] = client.messages.create(**{**weather, "messages": history}).content[0].text

parsed = client.messages.parse(**{**asked, "messages": [{"role": "user", "content": PERSON}]}, output_format=Person)
seen["parsed"] = parsed.parsed_output.model_dump()
thinking = {"type": "enabled", "budget_tokens": 20}
thought = validated(Message, client.messages.with_raw_response.create(thinking=thinking, **count).text())
seen["thinking"] = [block.type for block in thought.content]
raw_events(thinking=thinking, **count)
beta = client.beta.messages.with_raw_response.create(**count, betas=["context-management-2025-06-27"]).text()
seen["beta"] = validated(BetaMessage, beta).content[0].text
seen["prefilled"] = (
    client.messages.create(**{**count, "messages": [*count["messages"], {"role": "assistant", "content": "7, 8"}]})
    .content[0]
    .text
)


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


threads = []
threaded = Anthropic(
    base_url=url,
    api_key="unused",
    max_retries=0,
    http_client=anthropic.DefaultHttpxClient(
        event_hooks={"request": [lambda sent: threads.append(json.loads(sent.read()).get("thread"))]}
    ),
)
runner = threaded.beta.messages.tool_runner(
    model=model, max_tokens=60, tools=[get_weather], messages=weather["messages"], max_iterations=3, extra_body=greedy
)
said = runner.until_done()
seen["runner"] = [
    "".join(block.text for block in said.content if block.type == "text"),
    [one and one["type"] for one in threads],
]
picture = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
seen["errors"] = {
    "image": error_of(messages=[{"role": "user", "content": [picture]}]),
    "model": error_of(model="nobody"),
}
seen["models"] = model in [one.id for one in client.models.list()]
seen["model"] = validated(ModelInfo, client.models.with_raw_response.retrieve(model).text()).id
print(json.dumps({**seen, "unknown": sorted(unknown)}))
