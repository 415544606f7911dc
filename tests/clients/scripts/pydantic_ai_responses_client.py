"""pydantic-ai with its model for the Responses API: a tool, a typed output, stored conversations with reasoning.
Arguments: URL MODEL."""

import json
import sys

from common import COUNT, PERSON, WEATHER
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    """A person."""

    name: str
    age: int


base, name = sys.argv[1:]
model = OpenAIResponsesModel(name, provider=OpenAIProvider(base_url=f"{base}/v1", api_key="unused"))
greedy = OpenAIResponsesModelSettings(temperature=0, max_tokens=100)
teller = Agent(model, model_settings=greedy)


@teller.tool_plain
def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"18 degrees in {city}"


seen = {"answer": teller.run_sync(WEATHER).output}
seen["typed"] = (
    Agent(model, output_type=NativeOutput(Person), model_settings=greedy).run_sync(PERSON).output.model_dump()
)
stored = OpenAIResponsesModelSettings(
    **greedy, openai_previous_response_id="auto", openai_reasoning_effort="high", openai_reasoning_summary="auto"
)
thinker = Agent(model, model_settings=stored)
first = thinker.run_sync(COUNT)
seen["thought"] = [part.part_kind for part in first.all_messages()[-1].parts]
seen["counted"] = [first.output, thinker.run_sync("Count from 3 to 5.", message_history=first.all_messages()).output]
print(json.dumps(seen))
