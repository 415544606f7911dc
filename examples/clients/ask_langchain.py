"""Lets the model call a tool with LangChain: pip install langchain-openai; python ask_langchain.py [URL MODEL]"""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"18 degrees in {city}"


url, model = sys.argv[1:] or ("http://127.0.0.1:52415", "exo-mesh-demo")
chat = ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, temperature=0).bind_tools([get_weather])
question = HumanMessage("What is the weather in Paris?")
turn = chat.invoke([question])
results = [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in turn.tool_calls]
print(chat.invoke([question, turn, *results]).content)
