"""OpenAI's client with the Responses API: text, streams, tools, schemas, reasoning, stored responses. Arguments: URL
MODEL. Prints one JSON object. `unknown`: fields of replies that the package's types do not have."""

import json
import sys

import openai
from common import COUNT, PERSON, TOOL, WEATHER
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

url, model = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
tool = {"type": "function", "strict": False, **TOOL["function"]}
asked = {"model": model, "temperature": 0, "max_output_tokens": 60}
count = {**asked, "input": COUNT}
weather = {**asked, "input": WEATHER, "tools": [tool]}
unknown = set()
event_type = TypeAdapter(ResponseStreamEvent)


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


def validated(**fields):
    value = Response.model_validate_json(client.responses.with_raw_response.create(**fields).text, strict=True)
    strict(value)
    return value


def raw_events(**fields):
    """The types of all events of a stream, each validated."""
    kinds = []
    with client.responses.with_streaming_response.create(stream=True, **fields) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                event = event_type.validate_json(line[6:], strict=True)
                assert event.sequence_number == len(kinds)
                strict(event)
                kinds.append(event.type.removeprefix("response."))
    return kinds


def error_of(**fields):
    try:
        client.responses.create(**{**count, **fields})
    except openai.APIStatusError as exc:
        return [type(exc).__name__, exc.param, exc.code]
    return None


def output_of(call):
    return {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees in Paris"}


seen = {}
whole = validated(**count)
seen["chat"] = [whole.output_text, whole.status]
with client.responses.stream(**count) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    seen["streamed"] = [text, stream.get_final_response().usage.total_tokens == whole.usage.total_tokens]
seen["events"] = raw_events(**count)
seen["cut"] = (cut := validated(**{**count, "max_output_tokens": 3})).status, cut.incomplete_details.reason

called = validated(tool_choice="required", **weather)
call = called.output[-1]
seen["call"] = [call.name, json.loads(call.arguments), call.status]
seen["call events"] = sorted(set(raw_events(tool_choice="required", **weather)))
seen["stored answer"] = client.responses.create(
    **{**weather, "input": [output_of(call)]}, previous_response_id=called.id
).output_text
reference = {"type": "item_reference", "id": call.id}
history = [{"role": "user", "content": WEATHER}, reference, output_of(call)]
seen["referred answer"] = client.responses.create(**{**weather, "input": history}).output_text
history = [{"role": "user", "content": WEATHER}, *called.output, output_of(call)]
seen["sent answer"] = client.responses.create(**{**weather, "input": history}, store=False).output_text

parsed = client.responses.parse(**{**asked, "input": PERSON}, text_format=Person)
seen["parsed"] = parsed.output_parsed.model_dump()
thinks = {"effort": "high"}
thought = validated(**count, reasoning=thinks, include=["reasoning.encrypted_content"], store=False)
seen["reasoning"] = [thought.output[0].type, bool(thought.output[0].content), bool(thought.output[0].encrypted_content)]
summary = validated(**count, reasoning={**thinks, "summary": "auto"})
seen["summary"] = summary.output[0].summary[0].text == thought.output[0].content[0].text
seen["reasoning events"] = sorted(set(raw_events(**count, reasoning=thinks)))
with client.responses.stream(**count, reasoning=thinks) as stream:
    for _ in stream:
        pass
    seen["streamed reasoning"] = stream.get_final_response().output[0].type
scored = validated(**count, top_logprobs=2, include=["message.output_text.logprobs"])
seen["logprobs"] = "".join(one.token for one in scored.output[0].content[0].logprobs)

seen["read"] = client.responses.retrieve(whole.id) == client.responses.retrieve(whole.id)
again = list(client.responses.retrieve(whole.id, stream=True, starting_after=4))
seen["read again"] = [again[0].sequence_number, again[-1].response.output_text]
items = client.responses.input_items.list(called.id).data
seen["items"] = [(item.type, item.content[0].text) for item in items]
counted = client.responses.input_tokens.count(model=model, input=COUNT)
seen["counted"] = counted.input_tokens == whole.usage.input_tokens
seen["deleted"] = client.responses.delete(whole.id)
seen["errors"] = {
    "deleted": error_of(previous_response_id=whole.id),
    "background": error_of(background=True),
    "search": error_of(tools=[{"type": "web_search"}]),
    "model": error_of(model="nobody"),
}
print(json.dumps({**seen, "unknown": sorted(unknown)}))
