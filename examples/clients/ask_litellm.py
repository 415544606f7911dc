"""Streams an answer with litellm: pip install litellm; python ask_litellm.py [URL MODEL]"""

import sys

import litellm

url, model = sys.argv[1:] or ("http://127.0.0.1:52415", "exo-mesh-demo")
question = [{"role": "user", "content": "Count from 7 to 12."}]
for chunk in litellm.completion(
    model=f"openai/{model}", api_base=f"{url}/v1", api_key="unused", messages=question, temperature=0, stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
