"""langchain-openai: structured output in its three methods, and a tool. Arguments: URL MODEL."""

import json
import sys

from common import PERSON, WEATHER
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
chat = ChatOpenAI(base_url=f"{base}/v1", api_key="unused", model=model, temperature=0, max_retries=0, max_tokens=100)
seen = {}
for method in ("function_calling", "json_mode", "json_schema"):
    asked = f"{PERSON} The fields are name and age." if method == "json_mode" else PERSON
    made = chat.with_structured_output(Person, method=method, include_raw=True).invoke(asked)
    seen[method] = {"raw": made["raw"].content, "parsed": made["parsed"] and made["parsed"].model_dump(),
                    "error": repr(made["parsing_error"])}  # fmt: skip
turn = chat.bind_tools([get_weather]).invoke([HumanMessage(WEATHER)])
seen["calls"] = [{"name": call["name"], "args": call["args"]} for call in turn.tool_calls]
results = [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in turn.tool_calls]
seen["answer"] = chat.bind_tools([get_weather]).invoke([HumanMessage(WEATHER), turn, *results]).content
print(json.dumps(seen))
