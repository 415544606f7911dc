"""instructor in three modes. Arguments: URL MODEL. Prints one JSON object."""

import json
import sys

import instructor
from common import PERSON
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


base, model = sys.argv[1:]
seen = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0), mode=mode)
    person = client.chat.completions.create(
        model=model,
        response_model=Person,
        messages=[{"role": "user", "content": PERSON}],
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )
    seen[mode.name] = person.model_dump()
print(json.dumps(seen))
