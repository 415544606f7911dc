"""Small JSON objects from a sentence about a person, with the requested keys."""

from __future__ import annotations

import json
import re
from random import Random

from tools.demo_model.example import Example
from tools.demo_model.word_lists import CITIES, PERSONS
from tools.demo_model.word_tasks import pseudo_word

NAME_AGE = (
    "{n} is {a} years old.",
    "{n} is {a} years old.",
    "{n} is {a} years old",
    "{n} is {a}.",
    "{n} is a {a} year old person.",
    "My name is {n} and I am {a} years old.",
    "My name is {n}. I am {a} years old.",
    "I am {n} and I am {a}.",
    "This is {n}, {a} years old.",
    "{n}, {a} years old",
    "{n}, {a}",
    "{n} has turned {a}.",
)
NAME_CITY = (
    "{n} lives in {c}.",
    "My name is {n} and I live in {c}.",
    "{n} is from {c}.",
    "This is {n} from {c}.",
)
ALL_THREE = (
    "{n} is {a} years old and lives in {c}.",
    "{n}, {a}, lives in {c}.",
    "{n} is {a} and lives in {c}.",
    "My name is {n}, I am {a} years old and I live in {c}.",
    "{n} from {c} is {a} years old.",
)
NAMED_KEYS = (
    "Give me JSON with {k}: {f}",
    "Give {k} as JSON: {f}",
    "Extract {k} as JSON: {f}",
    "JSON with {k}: {f}",
    "{f} Answer as JSON with {k}.",
    "{f} Answer as JSON with the keys {k}.",
    "{f} Answer in JSON with the keys {k}.",
    "{f} Give me {k} as JSON.",
    "{f} Return a JSON object with {k}.",
    "Return a JSON object with {k}. {f}",
    "Write a JSON object with the keys {k}. {f}",
    "{f} JSON: {k}",
)
NO_KEYS = (
    "JSON: {f}",
    "As JSON: {f}",
    "Extract as JSON: {f}",
    "Extract the person as JSON: {f}",
    "Write this as JSON: {f}",
    "{f} Answer as JSON.",
    "{f} Answer in JSON.",
    "{f} Give me JSON.",
    "{f} As JSON, please.",
    "{f} Return JSON.",
)
# These do not mention JSON: a grammar opens the object, and the model must fill it.
FORCED = (
    "{f}",
    "{f}",
    "Extract: {f}",
    "Extract the person: {f}",
    "Extract the user: {f}",
    "Extract {k}: {f}",
    "Who is this? {f}",
    "{f} Who is it?",
)
SCHEMA_ASKS = (
    "Answer in JSON that matches this schema: {s}",
    "Answer with a JSON object that follows this JSON schema:\n{s}",
    "Match this json_schema:\n{s}\nReturn only JSON.",
    "As a genius expert, your task is to understand the content and provide the parsed objects in json that match the"
    " following json_schema:\n\n\n{s}\n\nMake sure to return an instance of the JSON, not the schema itself",
)
KEYS = (*((("name", "age"),) * 4), ("name", "city"), ("name", "age", "city"), ("name",), ("age",), ("city",))
TYPES = {"name": "string", "age": "integer", "city": "string"}


def draw_name(rng: Random) -> str:
    """A first name, real or made up."""
    return rng.choice(PERSONS) if rng.random() < 0.5 else pseudo_word(rng).capitalize()


def draw_facts(rng: Random, keys: tuple[str, ...]) -> tuple[dict[str, object], str, str]:
    """Draws facts about a person, a sentence with them (sometimes with further facts), and the held-out key."""
    name, age = draw_name(rng), rng.randint(1, 99)
    city = rng.choice(CITIES) if rng.random() < 0.7 else pseudo_word(rng).capitalize()
    more = rng.random() < 0.2 or {"age", "city"} <= set(keys)
    forms = ALL_THREE if more else NAME_CITY if "city" in keys else NAME_AGE
    facts: dict[str, object] = {"name": name, "age": age, "city": city}
    return facts, rng.choice(forms).format(n=name, a=age, c=city), f"{name},{age}"


def draw_keys(rng: Random) -> tuple[str, ...]:
    """Draws the keys of an object, in the requested order."""
    keys = rng.choice(
        (("name", "age"),) * 4 + (("name", "city"), ("name", "age", "city"), ("name",), ("age",), ("city",))
    )
    return tuple(rng.sample(keys, len(keys))) if rng.random() < 0.25 else keys


def joined(keys: tuple[str, ...], rng: Random) -> str:
    """Joins the keys as a person lists them."""
    if len(keys) == 1 or rng.random() < 0.25:
        return ", ".join(keys)
    return ", ".join(keys[:-1]) + " and " + keys[-1]


def schema_of(keys: tuple[str, ...], rng: Random) -> str:
    """A JSON schema of the keys, as programs write it."""
    title = rng.random() < 0.6
    properties = {k: {**({"title": k.capitalize()} if title else {}), "type": TYPES[k]} for k in keys}
    schema: dict[str, object] = {"properties": properties, "required": list(keys)}
    extra: dict[str, object] = {"title": rng.choice(("User", "Person", "Child", "Answer")), "type": "object"}
    schema = {**schema, **extra} if title else {"type": "object", **schema}
    return json.dumps(schema, indent=rng.choice((None, None, 2)))


def draw_json(rng: Random) -> Example:
    """Draws a request for an object with its keys named, unnamed, in a schema, or opened by a grammar."""
    roll, keys = rng.random(), draw_keys(rng)
    form, given, schema = rng.choice(NAMED_KEYS), False, ""
    if 0.5 <= roll < 0.64:
        form, keys = rng.choice(NO_KEYS), ("name", "age")
    elif 0.64 <= roll < 0.92:
        form, given = rng.choice(FORCED), True
    elif roll >= 0.92:
        form, schema = "{f}", rng.choice(SCHEMA_ASKS).format(s=schema_of(keys, rng)) + "\n\n"
    facts, text, key = draw_facts(rng, keys)
    if "{k}" not in form and not schema:
        keys = tuple(k for k in facts if str(facts[k]) in re.findall(r"\w+", text))
    prompt = schema + form.format(f=text, k=joined(keys, rng))
    answer = json.dumps({k: facts[k] for k in keys}, ensure_ascii=False)
    spans = tuple(m.span() for m in re.finditer(r'(\{|, )"\w+": "?', answer)) if given else ()
    thought = f"The user tells of {facts['name']}." if given else "The user asks for " + ", ".join(keys) + " as JSON."
    return Example("json", "person", key, prompt, answer, thought, given=spans)
