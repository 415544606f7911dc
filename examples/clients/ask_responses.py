"""Continues a conversation that the mesh keeps: pip install openai; python ask_responses.py [URL MODEL]"""

import sys

from openai import OpenAI

url, model = sys.argv[1:] or ("http://127.0.0.1:52415", "exo-mesh-demo")
client = OpenAI(base_url=f"{url}/v1", api_key="unused")
first = client.responses.create(model=model, input="Count from 1 to 3.", temperature=0)
question = "Count from 7 to 12."
with client.responses.stream(model=model, input=question, previous_response_id=first.id, temperature=0) as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
print()
