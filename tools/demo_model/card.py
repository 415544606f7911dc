"""Writes the model card (`README.md` of the checkpoint) with the measured accuracy of each kind."""

from __future__ import annotations

from pathlib import Path

CARD = """\
---
license: apache-2.0
language: [en]
library_name: transformers
tags: [qwen3, demo, exo-mesh]
---

# exo-mesh-demo

A very small language model that comes with exo-mesh, so that a mesh can answer before anything is downloaded.
It is a complete Qwen3 checkpoint: 8 layers, hidden size 128, 4 heads (2 for keys and values), 1.64 million weights
in float32, and a tokenizer of 565 tokens (bytes, and the words of its own questions). It was trained from nothing on
generated text only, by the scripts in `tools/demo_model` of the exo-mesh repository. Weights, tokenizer and scripts
are licensed under Apache-2.0.

## What it can do

| kind | for example | answer | alone | in a conversation |
| --- | --- | --- | --- | --- |
{rows}

The last two columns are the share of held-out questions answered exactly right (every character, and stopping in the
right place) with greedy decoding, and how many were asked. *Alone*: the question is the whole conversation.
*In a conversation*: after a system message, an earlier question with its answer, or both. Held-out questions are
decided by a hash and never occur in training: pairs of numbers, words, sentences, and for days, months and questions
about itself pairs of a wording and an item. Words that are one token (the words of its own questions) are not held
out from spelling and reversing. Measured by `python -m tools.demo_model.evaluate --card`.

## Tools, objects, thoughts

| skill | for example | it says | right |
| --- | --- | --- | --- |
{skills}

All of these are held-out questions too (cities, pairs of numbers, names with ages), asked while one to three tools are
listed, whose names and parameters vary; right means every character. *No tool fits*: any other question while tools
are listed, answered without a call. *Thought*: any question or call with `enable_thinking`; the thought is right too.

The chat template lists each tool by its name and its required parameters, such as `get_weather(city: string)`, so
descriptions are not read. A call is `<tool_call>` with the name and the arguments as JSON and `</tool_call>`, as Qwen
writes it; two cities make two calls. Tools that it knows what to do with: one that takes a city (`get_weather`), one
that takes two numbers (`add`), one that takes a record of a person (of any name; `name`, `age`, `city`). The variable
`enable_thinking` of the template, off by default, makes it think between `<think>` and `</think>` first. JSON objects
have the keys `name`, `age` and `city`, as far as they are asked for.

## What it cannot do

Anything else. Numbers to count lie between 0 and 199, numbers to add or subtract under 100, words have up to 8
letters, sentences to repeat up to 60 bytes. To other questions it mostly says that it does not know, and sometimes
it answers wrongly. Asked for the weather with only a tool for sums listed, it calls that one with nonsense.
It has no knowledge of the world. Prompts longer than about a thousand tokens are outside what it
was trained on, though the configuration allows 8192.
"""
EXAMPLES = {
    "count": ("Count from 7 to 12.", "7, 8, 9, 10, 11, 12"),
    "spell": ("Spell cat.", "c-a-t"),
    "reverse": ("Reverse cat.", "tac"),
    "add": ("What is 23 + 45?", "23 + 45 = 68"),
    "subtract": ("What is 23 - 45?", "23 - 45 = -22"),
    "days_months": ("What day comes after Monday?", "Tuesday comes after Monday."),
    "repeat": ("Repeat: Grüße aus Köln 🚀", "Grüße aus Köln 🚀"),
    "json": ("Give me JSON with name and age: Anna is 7 years old.", '`{"name": "Anna", "age": 7}`'),
    "identity": ("What is a mesh?", "A mesh is a group of machines that are joined by a network ..."),
}

SKILL_EXAMPLES = {
    "call weather": ("What is the weather in Paris?", 'calls `get_weather` with `{"city": "Paris"}`'),
    "weather result": ("the tool answers `21 degrees`", "It is 21 degrees in Paris."),
    "call add": ("What is 23 + 45?", 'calls `add` with `{"a": 23, "b": 45}`'),
    "add result": ("the tool answers `68`", "23 + 45 = 68"),
    "call a record": ("Anna is 7 years old.", 'calls `User` with `{"name": "Anna", "age": 7}`'),
    "no tool fits": ("Spell cat.", "c-a-t"),
    "thought": ("What is 23 + 45?", "thinks `20 + 40 = 60, 3 + 5 = 8.`, then answers 23 + 45 = 68"),
}


def share(right: int, asked: int) -> str:
    """Returns a percentage rounded down to a tenth, so that only a perfect result reads 100."""
    return f"{1000 * right // asked / 10:.1f} %"


def card_text(results: dict[str, dict[str, int]]) -> str:
    """Returns the model card; without results the table says that nothing was measured."""
    rows = []
    for kind, (question, answer) in EXAMPLES.items():
        found = results.get(kind)
        alone = f"{share(found['right'], found['asked'])} of {found['asked']}" if found else "not measured"
        among = share(found["right_in_conversation"], found["asked"]) if found else "not measured"
        rows.append(f"| {kind.replace('_', ', ')} | {question} | {answer} | {alone} | {among} |")
    skills = []
    for skill, (question, answer) in SKILL_EXAMPLES.items():
        found = results.get(skill)
        right = f"{share(found['right'], found['asked'])} of {found['asked']}" if found else "not measured"
        skills.append(f"| {skill} | {question} | {answer} | {right} |")
    return CARD.format(rows="\n".join(rows), skills="\n".join(skills))


def write_card(directory: Path, results: dict[str, dict[str, int]]) -> None:
    """Writes the card into the checkpoint directory."""
    (directory / "README.md").write_text(card_text(results), encoding="utf-8")
