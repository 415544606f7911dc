"""ollama: all calls of its client. Arguments: URL MODEL. Prints one JSON object.

Every raw reply is also compared with the package's own types: a field that they do not have is in "unknown".
"""

import json
import sys
import typing

import ollama
from common import COUNT, PERSON, TOOL, WEATHER
from ollama import _types as types
from pydantic import BaseModel

base, model = sys.argv[1:]
client = ollama.Client(base)
SURE = {"temperature": 0, "num_predict": 60}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OF_NODE_CLIENT = {"ListResponse.models.name"}
"""Fields that only the types of the client for Node have."""
unknown: set[str] = set()


def inner(annotation):
    """The pydantic model in an annotation, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in typing.get_args(annotation) if (found := inner(one))), None)


def compare(kind, value, where):
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict):
            continue
        fields = {field.alias or name: field for name, field in kind.model_fields.items()}
        for name, item in one.items():
            if name not in fields:
                unknown.add(f"{where}.{name}")
            elif (deeper := inner(fields[name].annotation)) is not None:
                compare(deeper, item, f"{where}.{name}")


def check(kind, method, path, body=None):
    """The raw reply, compared with the type that the package reads it as, and validated by it without conversions."""
    reply = client._client.request(method, path, json=body)
    lines = reply.text.splitlines() if "ndjson" in reply.headers["content-type"] else [reply.text]
    for line in lines:
        kind.model_validate_json(line, strict=True)
        compare(kind, json.loads(line), kind.__name__)


def refused(call, **arguments):
    try:
        call(**arguments)
    except ollama.ResponseError as error:
        return [error.status_code, error.error]


user = [{"role": "user", "content": COUNT}]
asked = [{"role": "user", "content": WEATHER}]
seen = {"version": client._request_raw("GET", "/api/version").json()["version"]}
seen["root"] = client._request_raw("HEAD", "/").status_code
seen["listed"] = [one.model for one in client.list().models]
shown = client.show(model)
seen["shown"] = [shown.capabilities, bool(shown.template), bool(shown.modelinfo)]
seen["chat"] = client.chat(model, user, options=SURE).message.content
parts = list(client.chat(model, user, stream=True, options=SURE))
seen["streamed"] = "".join(part.message.content for part in parts)
last = parts[-1]
seen["counts"] = [last.done, last.done_reason, last.eval_count > 0, last.prompt_eval_count > 0, last.total_duration > 0]
called = client.chat(model, asked, tools=[TOOL], options=SURE)
function = called.message.tool_calls[0].function
seen["tool"] = {"name": function.name, "arguments": dict(function.arguments)}
result = {"role": "tool", "content": '{"degrees": 18}', "tool_name": function.name}
seen["answer"] = client.chat(model, [*asked, called.message, result], tools=[TOOL], options=SURE).message.content
streamed = client.chat(model, asked, tools=[TOOL], stream=True, options=SURE)
seen["streamed_tools"] = [call.function.name for part in streamed for call in part.message.tool_calls or ()]
person = [{"role": "user", "content": PERSON}]
seen["schema"] = json.loads(client.chat(model, person, format=SCHEMA, options=SURE).message.content)
seen["json"] = type(json.loads(client.chat(model, person, format="json", options=SURE).message.content)).__name__
seen["generated"] = client.generate(model, COUNT, options=SURE).response
seen["generated_stream"] = "".join(part.response for part in client.generate(model, COUNT, stream=True, options=SURE))
seen["raw"] = len(client.generate(model, "7, 8,", raw=True, options={"num_predict": 4}).response) > 0
seen["logprobs"] = len(client.chat(model, user, logprobs=True, top_logprobs=2, options=SURE).logprobs[0].top_logprobs)
seen["embedded"] = [len(client.embed(model=model, input=["x", "y"], dimensions=8).embeddings[1]),
                    len(client.embeddings(model=model, prompt="x").embedding) > 8]  # fmt: skip
seen["loaded"] = client.generate(model, keep_alive="10m").done_reason
seen["running"] = [one.name for one in client.ps().models]
seen["kept"] = client.chat(model, [], keep_alive=-1).done_reason
progress = [line.status for line in client.pull(model, stream=True)]
seen["pulled"] = [progress[0], progress[-1]]
seen["missing"] = {
    "model": refused(client.chat, model="nope", messages=user),
    "create": refused(client.create, model="x", from_=model),
    "copy": refused(client.copy, source=model, destination="x"),
    "push": refused(client.push, model=model),
    "pull": refused(client.pull, model="org/nowhere"),
    "delete": refused(client.delete, model="nope"),
}

for kind, path, body in (
    (types.ChatResponse, "/api/chat", {"messages": user, "options": SURE, "logprobs": True, "top_logprobs": 1}),
    (types.ChatResponse, "/api/chat", {"messages": asked, "options": SURE, "tools": [TOOL], "stream": False}),
    (types.GenerateResponse, "/api/generate", {"prompt": COUNT, "options": SURE}),
    (types.GenerateResponse, "/api/generate", {"prompt": COUNT, "options": SURE, "stream": False}),
    (types.GenerateResponse, "/api/generate", {}),
    (types.ShowResponse, "/api/show", {}),
):
    check(kind, "POST", path, {"model": model, **body})
check(types.ListResponse, "GET", "/api/tags")
check(types.ProcessResponse, "GET", "/api/ps")
seen["unknown"] = sorted(unknown - OF_NODE_CLIENT)
print(json.dumps(seen))
