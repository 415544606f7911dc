"""langchain-openai with use_responses_api: text, a stream, a schema, tools, stored conversations. Arguments: URL
MODEL."""

import json
import sys

from common import COUNT, PERSON, WEATHER
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@tool
def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"18 degrees in {city}"


base, model = sys.argv[1:]
common = {"base_url": f"{base}/v1", "api_key": "unused", "model": model, "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(**common, max_tokens=100, use_responses_api=True)
seen = {"chat": chat.invoke(COUNT).text, "streamed": "".join(chunk.text for chunk in chat.stream(COUNT))}
seen["parsed"] = chat.with_structured_output(Person, method="json_schema").invoke(PERSON).model_dump()
for name, kept in (("sent", False), ("stored", True)):
    teller = ChatOpenAI(**common, max_tokens=100, use_responses_api=True, use_previous_response_id=kept)
    tooled = teller.bind_tools([get_weather])
    turn = tooled.invoke([HumanMessage(WEATHER)])
    results = [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in turn.tool_calls]
    seen[name] = [
        [call["args"] for call in turn.tool_calls],
        tooled.invoke([HumanMessage(WEATHER), turn, *results]).text,
    ]
thinker = ChatOpenAI(
    **common, max_tokens=100, use_responses_api=True, reasoning={"effort": "high", "summary": "auto"},
    output_version="responses/v1",
)  # fmt: skip
seen["reasoning"] = thinker.invoke(COUNT).content[0]["type"]
print(json.dumps(seen))
