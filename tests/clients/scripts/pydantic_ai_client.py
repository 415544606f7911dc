"""pydantic-ai: an output type by tool and by schema, and a tool that is called. Arguments: URL MODEL."""

import json
import sys

from common import PERSON, WEATHER
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


base, model = sys.argv[1:]
chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{base}/v1", api_key="unused"))
settings = {"temperature": 0, "max_tokens": 200}
seen = {}
for name, kind in (("tool", ToolOutput(Person)), ("native", NativeOutput(Person))):
    seen[name] = Agent(chat, output_type=kind, model_settings=settings).run_sync(PERSON).output.model_dump()
agent = Agent(chat, model_settings=settings)
cities = []


@agent.tool_plain
def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    cities.append(city)
    return f"18 degrees in {city}"


seen["answer"] = agent.run_sync(WEATHER).output
seen["cities"] = cities
print(json.dumps(seen))
