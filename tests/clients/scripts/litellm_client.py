"""litellm: chat, a stream, and a tool call. Arguments: URL MODEL. Prints one JSON object."""

import json
import sys

import litellm
from common import COUNT, TOOL, WEATHER

base, model = sys.argv[1:]
to = {"model": f"openai/{model}", "api_base": f"{base}/v1", "api_key": "unused", "temperature": 0, "num_retries": 0}
reply = litellm.completion(messages=[{"role": "user", "content": COUNT}], max_tokens=40, **to)
chunks = litellm.completion(messages=[{"role": "user", "content": COUNT}], max_tokens=40, stream=True, **to)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
claude = {**to, "model": f"anthropic/{model}", "api_base": base}
message = litellm.completion(messages=[{"role": "user", "content": COUNT}], max_tokens=40, **claude)
called = litellm.completion(messages=[{"role": "user", "content": WEATHER}], tools=[TOOL], tool_choice="required", **to)
ollama = {**to, "model": f"ollama_chat/{model}", "api_base": base}
of_ollama = litellm.completion(messages=[{"role": "user", "content": COUNT}], max_tokens=40, **ollama)
call = called.choices[0].message.tool_calls[0]
print(
    json.dumps(
        {
            "chat": reply.choices[0].message.content,
            "streamed": streamed,
            "anthropic": message.choices[0].message.content,
            "ollama": of_ollama.choices[0].message.content,
            "tool": {"name": call.function.name, "arguments": json.loads(call.function.arguments)},
            "finish": called.choices[0].finish_reason,
        }
    )
)
