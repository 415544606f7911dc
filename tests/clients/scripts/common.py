"""What the clients ask, and the tool and the schema that they offer."""

COUNT = "Count from 7 to 12."
WEATHER = "What is the weather in Paris?"
PERSON = "Make JSON: Anna is 7."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
