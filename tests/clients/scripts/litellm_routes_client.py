"""litellm by its other routes: completions, responses, messages. Arguments: URL MODEL. Prints one JSON object."""

import asyncio
import json
import sys

import litellm
from common import COUNT, TOOL, WEATHER

base, model = sys.argv[1:]
to = {"model": f"openai/{model}", "api_base": f"{base}/v1", "api_key": "unused", "temperature": 0}
tool = {"type": "function", **TOOL["function"]}


def text_of(response):
    return "".join(part.text for item in response.output if item.type == "message" for part in item.content)


completed = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="7, 8, 9,", max_tokens=5,
                                    api_base=f"{base}/v1", api_key="unused", temperature=0)  # fmt: skip
response = litellm.responses(input=COUNT, max_output_tokens=60, **to)
events = list(litellm.responses(input=COUNT, max_output_tokens=60, stream=True, **to))
deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
called = litellm.responses(input=WEATHER, tools=[tool], tool_choice="required", **to)
call = called.output[-1]
output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees in Paris"}
answer = litellm.responses(input=[output], previous_response_id=called.id, tools=[tool], **to)
message = asyncio.run(
    litellm.anthropic_messages(
        messages=[{"role": "user", "content": COUNT}], max_tokens=60,
        model=f"anthropic/{model}", api_base=base, api_key="unused", temperature=0,
    )
)  # fmt: skip
print(
    json.dumps(
        {
            "completion": [completed.choices[0].finish_reason, completed.usage.completion_tokens],
            "response": text_of(response),
            "streamed": "".join(deltas),
            "last event": str(getattr(events[-1].type, "value", events[-1].type)),
            "call": [call.name, json.loads(call.arguments)],
            "answer": text_of(answer),
            "message": message["content"][0]["text"],
        }
    )
)
