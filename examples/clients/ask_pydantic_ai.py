"""Gets a typed object with pydantic-ai: pip install pydantic-ai; python ask_pydantic_ai.py [URL MODEL]"""

import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


url, model = sys.argv[1:] or ("http://127.0.0.1:52415", "exo-mesh-demo")
chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="unused"))
agent = Agent(chat, output_type=NativeOutput(Person), model_settings={"temperature": 0})
print(agent.run_sync("Make JSON: Anna is 7.").output)
