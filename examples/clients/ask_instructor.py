"""Gets a typed object with instructor: pip install instructor; python ask_instructor.py [URL MODEL]"""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


url, model = sys.argv[1:] or ("http://127.0.0.1:52415", "exo-mesh-demo")
client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="unused"), mode=instructor.Mode.JSON_SCHEMA)
question = [{"role": "user", "content": "Make JSON: Anna is 7."}]
print(client.chat.completions.create(model=model, response_model=Person, messages=question, temperature=0))
