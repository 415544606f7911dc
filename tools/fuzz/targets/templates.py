"""Chat templates that loop, grow or recur, with tools whose schemas they go through."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tools.fuzz.models import Edit, ask_all, edit_json, hostile_models
from tools.fuzz.rig import Rig

COUNT, NUM_NODES, CLOSED = 8, 1, False
FLAGS = ("--discovery", "none", "--models-dir", "DIRECTORY/models")
MAX_NODE_SHARE = 1.6
MAX_TOOLS = 128

_LOOPS = (
    "{% for t in tools %}{% for u in tools %}{% for v in tools %}{% for w in tools %}{{ w | tojson }}"
    "{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for t in tools recursive %}{{ loop(tools) }}{% endfor %}",
)
GROWTH = (
    "{% set ns = namespace(a='aaaaaaaa') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "{% set a = tools | tojson %}{% set b %}{% for i in range(99999) %}{{ a }}{% endfor %}{% endset %}{{ b | length }}",
    "{{ tools | tojson(indent=99999999) }}",
    "{{ 'a' * 4000000000 }}",
    "{{ '%0999999999d' % 1 }}",
)
_RECURSION = (
    "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(tools) }}",
    "{% macro f(s) %}{% for k in s.properties or {} %}{{ f(s) }}{% endfor %}{% endmacro %}"
    "{% for t in tools %}{{ f(t.function.parameters) }}{% endfor %}",
    "{{ [tools] | tojson }}" + "{% if true %}" * 400 + "{% endif %}" * 400,
)
_FIELDS = (
    "{{ tools.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{{ raise_exception('x' * 99999999) }}",
    "{{ messages[0].content.format(messages) }}", "{% include 'x' %}", "{{ strftime_now('%Y' * 9999999) }}",
)  # fmt: skip


def _with(templates: Sequence[str]) -> Edit:
    def edit(rng: random.Random, model: Path) -> None:
        parts = [rng.choice(templates), "{% for m in messages %}{{ m.content }}{% endfor %}"]
        rng.shuffle(parts)
        guard = rng.choice(
            ("{}", "{{% if tools %}}{}{{% endif %}}", "{{% if messages[0].content | length > 3 %}}{}{{% endif %}}")
        )
        text = guard.replace("{{%", "{%").replace("%}}", "%}").replace("{}", "".join(parts), 1) + "{{ tools }}"
        edit_json(model / "tokenizer_config.json", lambda d: d.update(chat_template=text))

    return edit


EDITS: dict[str, Edit] = {
    "loops": _with(_LOOPS), "growth": _with(GROWTH), "recursion": _with(_RECURSION), "fields": _with(_FIELDS),
}  # fmt: skip


def prepared(directory: Path, seed: int, numbers: Sequence[int]) -> AbstractContextManager[dict[str, str]]:
    return hostile_models(directory, seed, numbers, EDITS)


def schema(rng: random.Random) -> dict[str, Any]:
    """Returns a schema that is deep, wide, or refers to itself."""
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(rng.choice((1, 100)))}}
    if kind == 1:
        return {"$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"}
    if kind == 2:
        deep: dict[str, Any] = {"type": "string"}
        for _ in range(rng.choice((10, 60))):
            deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
        return deep
    return {"type": "object", "properties": {"a": {"enum": list(range(rng.choice((3, 100))))}}}


def body(_: str, rng: random.Random) -> dict[str, Any]:
    """Returns a chat with no tools, a few, or many."""
    functions = [{"name": f"f{i}", "parameters": schema(rng)} for i in range(rng.choice((0, 1, 5, MAX_TOOLS)))]
    tools = {"tools": [{"type": "function", "function": one} for one in functions]} if functions else {}
    return {"messages": [{"role": "user", "content": rng.choice(("a", "{0.__class__}", "long " * 50))}], **tools}


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Asks for each model once."""
    return Counter(await ask_all(rig, body))
