"""Streams an answer with OpenAI's own client: pip install openai; python ask_openai.py [URL MODEL]"""

import sys

from openai import OpenAI

url, model = sys.argv[1:] or ("http://127.0.0.1:52415", "exo-mesh-demo")
client = OpenAI(base_url=f"{url}/v1", api_key="unused")
question = [{"role": "user", "content": "Count from 7 to 12."}]
for chunk in client.chat.completions.create(model=model, messages=question, temperature=0, stream=True):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
