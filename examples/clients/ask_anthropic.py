"""Streams an answer with Anthropic's own client: pip install anthropic; python ask_anthropic.py [URL MODEL]"""

import sys

from anthropic import Anthropic

url, model = sys.argv[1:] or ("http://127.0.0.1:52415", "exo-mesh-demo")
client = Anthropic(base_url=url, api_key="unused")
question = [{"role": "user", "content": "Count from 7 to 12."}]
greedy = {"temperature": 0}
with client.messages.stream(model=model, max_tokens=100, messages=question, extra_body=greedy) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
