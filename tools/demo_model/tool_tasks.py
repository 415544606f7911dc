"""Questions that a tool answers: the weather in a city, a sum, a record of a person."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from tools.demo_model.example import Example, key_is_held_out
from tools.demo_model.json_tasks import draw_facts
from tools.demo_model.numbers_tasks import ADD
from tools.demo_model.tools_known import RECORD, SUM, WEATHER, KnownTool
from tools.demo_model.word_lists import CITIES, LONG_CITIES
from tools.demo_model.word_tasks import pseudo_word

ASK_WEATHER = (
    "What is the weather in {c}?",
    "What is the weather in {c}?",
    "What's the weather in {c}?",
    "what is the weather in {c}",
    "What is the weather like in {c}?",
    "What's the weather like in {c}?",
    "What is the weather like in {c} today?",
    "What's the weather in {c} today?",
    "What is the weather in {c} right now?",
    "How is the weather in {c}?",
    "how is the weather in {c}",
    "Tell me the weather in {c}.",
    "Please tell me the weather in {c}.",
    "Can you tell me the weather in {c}?",
    "How warm is it in {c}?",
    "How cold is it in {c}?",
    "How hot is it in {c} today?",
    "Is it warm in {c}?",
    "What is the temperature in {c}?",
    "what is the temperature in {c}",
    "What's the temperature in {c} now?",
    "Weather in {c}?",
    "weather in {c}",
    "The weather in {c}, please.",
    "Get the weather in {c}.",
    "Use the tool: what is the weather in {c}?",
    "And in {c}?",
)
ASK_TWO = (
    "What is the weather in {c} and {d}?",
    "What is the weather in {c} and in {d}?",
    "What's the weather in {c} and in {d}?",
    "What's the weather like in {c} and {d}?",
    "Tell me the weather in {c} and {d}.",
    "How warm is it in {c} and in {d}?",
)
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy", "dry", "warm", "cold", "hot")
DEGREES = (
    "{t} degrees",
    "{t} degrees",
    "{t}",
    "{t}°C",
    "{t} °C",
    "{t} C",
    "It is {t} degrees.",
    "It is {t} degrees in {c}.",
    '{{"temperature": {t}}}',
    '{{"temperature": {t}}}',
    '{{"temperature":{t}}}',
    '{{"city": "{c}", "temperature": {t}}}',
    '{{"city":"{c}","temperature":{t}}}',
    '{{"temperature": {t}, "unit": "celsius"}}',
    '{{"degrees": {t}}}',
    "{c}: {t} degrees",
)
SKY = ("{s}", "It is {s}.", "It is {s} in {c}.", "It's {s} in {c}!", "It's always {s} in {c}!", '{{"weather": "{s}"}}')
SKY += ("The weather in {c} is {s}.", '{{"city": "{c}", "weather": "{s}"}}')
BOTH = (
    "{s}, {t} degrees",
    "{t} degrees and {s}",
    "{t} degrees, {s}",
    "{s}, {t}°C",
    "It is {t} degrees and {s} in {c}.",
    '{{"temperature": {t}, "sky": "{s}"}}',
    '{{"weather": "{s}", "temperature": {t}}}',
    '{{"temperature": {t}, "weather": "{s}"}}',
    '{{"city": "{c}", "temperature": {t}, "condition": "{s}"}}',
)
FAILED = (
    "error",
    "unknown city",
    "not found",
    "Error: no such city",
    '{{"error": "not found"}}',
    "city not found: {c}",
)
SUM_RESULTS = (
    "{r}",
    "{r}",
    "{r}",
    '{{"result": {r}}}',
    '{{"result":{r}}}',
    '{{"sum": {r}}}',
    "{a} + {b} = {r}",
    "The sum is {r}.",
    "The result is {r}.",
)
ASK_SUM = (
    *ADD,
    "Use the tool to add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "What is {a} + {b}? Use the tool.",
)
ASK_RECORD = (
    "{f}",
    "{f}",
    "{f}",
    "Extract: {f}",
    "Extract the person: {f}",
    "Extract the user: {f}",
    "Extract name and age: {f}",
    "Extract the data: {f}",
    "Save this: {f}",
    "Use the tool: {f}",
    "{f} Who is this?",
    "Read this: {f}",
)
THOUGHT_OF_RESULT = "The tool has answered."


def draw_city(rng: Random) -> str:
    """Draws a city, real or made up."""
    roll = rng.random()
    if roll < 0.45:
        return rng.choice(CITIES)
    if roll < 0.52:
        return rng.choice(LONG_CITIES)
    return pseudo_word(rng).capitalize()


def draw_weather_result(city: str, rng: Random) -> tuple[str, str]:
    """Draws a weather tool's answer and its meaning, such as `21 degrees`; an empty meaning if the tool failed."""
    degrees, sky, roll = rng.randint(-15, 42), rng.choice(SKIES), rng.random()
    if roll < 0.6:
        return rng.choice(DEGREES).format(t=degrees, c=city), f"{degrees} degrees"
    if roll < 0.75:
        return rng.choice(SKY).format(s=sky, c=city), sky
    if roll < 0.95:
        return rng.choice(BOTH).format(t=degrees, s=sky, c=city), f"{degrees} degrees and {sky}"
    return rng.choice(FAILED).format(c=city), ""


def draw_weather(rng: Random, tool: KnownTool) -> Example:
    """Draws a question for the weather in a city, sometimes in two at once; cities are held out."""
    city = draw_city(rng)
    (key,) = tool.keys
    if rng.random() < 0.12:
        return draw_two_cities(rng, tool, city)
    result, found = draw_weather_result(city, rng)
    final = f"It is {found} in {city}." if found else f"I do not know the weather in {city}."
    prompt = rng.choice(ASK_WEATHER).format(c=city)
    thought = f"I need the weather in {city}."
    return Example("weather", "city", city, prompt, tool.call({key: city}), thought, (result,), final)


def draw_two_cities(rng: Random, tool: KnownTool, city: str) -> Example:
    """Draws two calls in one answer. The second city is held out if and only if the first one is."""
    other = draw_city(rng)
    while other == city or key_is_held_out("city", other) != key_is_held_out("city", city):
        other = draw_city(rng)
    key, degrees = tool.keys[0], (rng.randint(-15, 42), rng.randint(-15, 42))
    form = rng.choice(DEGREES)
    results = tuple(form.format(t=t, c=c) for t, c in zip(degrees, (city, other), strict=True))
    prompt = rng.choice(ASK_TWO).format(c=city, d=other)
    calls = tool.call({key: city}) + "\n" + tool.call({key: other})
    final = f"It is {degrees[0]} degrees in {city} and {degrees[1]} degrees in {other}."
    thought = f"I need the weather in {city} and in {other}."
    return Example("weather", "city", city, prompt, calls, thought, results, final)


def draw_sum(rng: Random, tool: KnownTool) -> Example:
    """Draws a sum for a tool; its result is repeated, right or wrong. Pairs of numbers are held out, as in `add`."""
    most = rng.choice((99, 99, 999, 9999))
    a, b = rng.randint(0, most), rng.randint(0, most)
    result = a + b if rng.random() < 0.8 else rng.randint(0, 2 * most)
    prompt = rng.choice(ASK_SUM).format(a=a, b=b)
    call = tool.call(dict(zip(tool.keys, (a, b), strict=True)))
    given = rng.choice(SUM_RESULTS).format(a=a, b=b, r=result)
    thought = f"I need the sum of {a} and {b}."
    return Example("sum", "add", f"{min(a, b)},{max(a, b)}", prompt, call, thought, (given,), f"{a} + {b} = {result}")


def draw_record(rng: Random, tool: KnownTool) -> Example:
    """Draws a sentence about a person for a tool that takes records of persons; names with ages are held out."""
    facts, text, key = draw_facts(rng, tool.keys)
    call = tool.call({name: facts[name] for name in tool.keys})
    thought = f"The user tells of {facts['name']}."
    results = (rng.choice(("ok", "OK", "saved", "Done.", "done", "Final result processed.", json.dumps({"ok": True}))),)
    return Example("record", "person", key, rng.choice(ASK_RECORD).format(f=text), call, thought, results, "Done.")


TOOL_DRAWS: dict[str, Callable[[Random, KnownTool], Example]] = {
    WEATHER: draw_weather,
    SUM: draw_sum,
    RECORD: draw_record,
}
