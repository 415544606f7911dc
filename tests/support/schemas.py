"""Random JSON schemas that any model can fill in: strings, numbers and arrays are bounded."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "size", "id", "Größe", "is_open", "a b", "items", "日付", "x", "note", "émoji😀", 'quo"te', "tab\t")
PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(red|green|blue)$", "^[A-F0-9]{4}$", "^a?b{1,3}c$")
ROOT = 3
"""Levels of a whole schema; only that one has definitions."""

FORMATS = ("date", "time", "uuid", "ipv4")


def random_schema(rng: random.Random, depth: int = ROOT) -> dict[str, Any]:
    """An object, as clients ask for, with up to `depth` levels inside."""
    names = rng.sample(WORDS, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": names if rng.random() < 0.5 else rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
    if depth == ROOT and rng.random() < 0.2:
        schema["$defs"] = {"shared": _leaf(rng)}
        schema["properties"]["ref"] = {"$ref": "#/$defs/shared"}
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth <= 0 or rng.random() < 0.5:
        return _leaf(rng)
    kind = rng.choice(("object", "array", "array", "tuple", "any"))
    if kind == "object":
        return random_schema(rng, depth)
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": least, "maxItems": rng.randint(least, 3)}
    if kind == "tuple":
        items = [_value(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    return {"anyOf": [_leaf(rng), _value(rng, depth - 1)]}


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-100, 100)
    leaves: tuple[dict[str, Any], ...] = (
        {"type": "string", "maxLength": rng.randint(0, 12)},
        {"type": "string", "minLength": 2, "maxLength": 6},
        {"type": "string", "pattern": rng.choice(PATTERNS)},
        {"type": "string", "format": rng.choice(FORMATS)},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)},
        {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.choice((2, 5, 7))},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": rng.sample(["a", "b", 1, None, True, {"k": [1]}, 2.5], rng.randint(1, 4))},
        {"const": rng.choice(["fixed", 0, False, [1, 2], "ü"])},
        {"type": ["boolean", "null"]},
    )
    return rng.choice(leaves)
