"""Streams an answer with Ollama's client: pip install ollama; python ask_ollama.py [URL MODEL]"""

import sys

import ollama

url, model = sys.argv[1:] or ("http://127.0.0.1:52415", "exo-mesh-demo")
question = [{"role": "user", "content": "Count from 7 to 12."}]
for part in ollama.Client(url).chat(model, question, stream=True, options={"temperature": 0}):
    print(part.message.content or "", end="", flush=True)
print()
