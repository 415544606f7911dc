"""The tools that conversations offer: their names and parameters, and their form in the model's template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from tools.demo_model.word_tasks import pseudo_word

WEATHER, SUM, RECORD, DECOY = "weather", "sum", "record", "decoy"
WEATHER_NAMES = ("weather", "get_current_weather", "current_weather", "get_temperature", "fetch_weather")
WEATHER_KEYS = ("location", "place", "city_name", "town")
SUM_NAMES = ("sum", "add_numbers", "plus", "calculate_sum", "addition", "add_two_numbers")
SUM_KEYS = (("x", "y"), ("first", "second"), ("a", "b"), ("left", "right"), ("num1", "num2"))
RECORD_NAMES = (
    "User",
    "Person",
    "final_result",
    "UserInfo",
    "Child",
    "extract_person",
    "save_person",
    "Response",
    "person",
    "record",
    "add_user",
    "UserDetail",
    "json",
    "Customer",
)
DECOYS = (
    "get_time(city: string)",
    "search(query: string)",
    "send_mail(to: string, text: string)",
    "open_page(url: string)",
    "run(command: string)",
    "read_file(path: string)",
    "write_file(path: string, content: string)",
    "translate(text: string, language: string)",
    "get_price(item: string)",
    "roll_dice()",
    "get_date()",
    "set_light(on: boolean)",
    "multiply(a: integer, b: integer)",
    "book(room: string, day: string)",
)


@dataclass(frozen=True)
class KnownTool:
    """A tool of one family; `keys` are its required parameters, in the order in which the model must give them."""

    family: str
    name: str
    keys: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    line: str = ""

    def signature(self) -> str:
        """The tool's line in the template."""
        pairs = (f"{key}: {kind}" for key, kind in zip(self.keys, self.types, strict=True))
        return self.line or f"{self.name}({', '.join(pairs)})"

    def call(self, arguments: dict[str, object]) -> str:
        """The text with which the model calls the tool."""
        written = json.dumps(arguments, ensure_ascii=False)
        return f'<tool_call>\n{{"name": "{self.name}", "arguments": {written}}}\n</tool_call>'


GET_WEATHER = KnownTool(WEATHER, "get_weather", ("city",), ("string",))
ADD_TOOL = KnownTool(SUM, "add", ("a", "b"), ("integer", "integer"))


def draw_tool(family: str, rng: Random) -> KnownTool:
    """Draws a tool of the family: mostly the documented one, else one with another name."""
    usual = rng.random() < 0.55
    if family == WEATHER:
        if usual:
            return GET_WEATHER
        key = rng.choice(WEATHER_KEYS + ("city",) * 3)
        return KnownTool(WEATHER, rng.choice((*WEATHER_NAMES, "get_weather")), (key,), ("string",))
    if family == SUM:
        if usual:
            return ADD_TOOL
        kind = rng.choice(("integer", "integer", "number", "any"))
        return KnownTool(SUM, rng.choice((*SUM_NAMES, "add")), rng.choice(SUM_KEYS), (kind, kind))
    if family == RECORD:
        types = {"name": "string", "age": "integer", "city": "string"}
        keys = rng.choice(
            (("name", "age"),) * 4 + (("age", "name"), ("name", "city"), ("name", "age", "city"), ("name",))
        )
        name = rng.choice(RECORD_NAMES) if rng.random() < 0.7 else pseudo_word(rng).capitalize()
        return KnownTool(RECORD, name, keys, tuple(types[key] for key in keys))
    return KnownTool(DECOY, "", line=rng.choice(DECOYS))


def draw_kit(rng: Random, family: str | None = None) -> tuple[KnownTool, ...]:
    """Draws one to three tools, at most one of each family; one of the given family is among them."""
    others = [name for name in (WEATHER, SUM, RECORD, DECOY) if name != family]
    families = rng.sample(others, rng.choices((0, 1, 2), (0.45, 0.35, 0.2))[0])
    families += [family] if family else [rng.choice(others)] if not families else []
    rng.shuffle(families)
    return tuple(draw_tool(name, rng) for name in families)


def list_tools(kit: tuple[KnownTool, ...]) -> str:
    """Lists the tools for the system turn, as the template writes it."""
    return "<tools>\n" + "".join(tool.signature() + "\n" for tool in kit) + "</tools>"
