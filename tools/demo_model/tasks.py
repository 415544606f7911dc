"""All kinds of questions, their share of the training tokens, and the fixed held-out test set."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tools.demo_model.days_tasks import draw_days_months
from tools.demo_model.example import Example, is_held_out
from tools.demo_model.identity_tasks import draw_identity, draw_other
from tools.demo_model.json_tasks import draw_json
from tools.demo_model.numbers_tasks import draw_add, draw_count, draw_subtract, draw_uniform_count
from tools.demo_model.repeat_tasks import draw_repeat
from tools.demo_model.tool_tasks import TOOL_DRAWS
from tools.demo_model.tools_known import KnownTool
from tools.demo_model.word_tasks import draw_reverse, draw_spell

Draw = Callable[[Random], Example]
TRAIN_DRAWS: dict[str, Draw] = {
    "count": draw_count,
    "spell": draw_spell,
    "reverse": draw_reverse,
    "add": draw_add,
    "subtract": draw_subtract,
    "days_months": draw_days_months,
    "repeat": draw_repeat,
    "identity": draw_identity,
    "json": draw_json,
    "other": draw_other,
}
TEST_DRAWS: dict[str, Draw] = {**TRAIN_DRAWS, "count": draw_uniform_count}
TESTED = ("count", "spell", "reverse", "add", "subtract", "days_months", "repeat", "identity", "json")
# How often each kind is drawn (turns, not tokens: a counting answer is long, an identity answer short).
WEIGHTS = {
    "count": 30.0,
    "spell": 6.0,
    "reverse": 9.0,
    "add": 14.0,
    "subtract": 22.0,
    "days_months": 5.0,
    "repeat": 28.0,
    "identity": 4.0,
    "json": 16.0,
    "other": 2.5,
}
# The same for the questions that an offered tool of the family answers.
TOOL_WEIGHTS = {"weather": 10.0, "sum": 8.0, "record": 6.0}


def draw_training(kind: str, rng: Random) -> Example:
    """Draws a training question of the kind, never a held-out one."""
    while True:
        example = TRAIN_DRAWS[kind](rng)
        if not is_held_out(example):
            return example


def draw_training_call(tool: KnownTool, rng: Random) -> Example:
    """Draws a training question that the tool answers, never a held-out one."""
    while True:
        example = TOOL_DRAWS[tool.family](rng, tool)
        if not is_held_out(example):
            return example


def fits(example: Example, kit: tuple[KnownTool, ...]) -> bool:
    """Whether one of the tools could answer a question that must be answered without tools."""
    families = {tool.family for tool in kit}
    return (
        (example.kind == "add" and "sum" in families)
        or (example.kind == "json" and "record" in families)
        or ("weather" in example.prompt and "weather" in families)
    )


def draw_beside_tools(kit: tuple[KnownTool, ...], rng: Random, weights: dict[str, float] | None = None) -> Example:
    """Draws a training question that none of the offered tools answers."""
    while True:
        example = draw_mixed(rng, weights)
        if not fits(example, kit):
            return example


def draw_mixed(rng: Random, weights: dict[str, float] | None = None) -> Example:
    """Draws a training question of any kind, by weight."""
    weights = weights or WEIGHTS
    return draw_training(rng.choices(tuple(weights), tuple(weights.values()))[0], rng)


def held_out_set(kind: str, size: int = 400, seed: int = 1) -> list[Example]:
    """Returns up to `size` held-out questions of the kind, with different prompts; the same on every machine."""
    rng = Random(f"held-out {kind} {seed}")
    found: dict[str, Example] = {}
    for _ in range(size * 400):
        example = TEST_DRAWS[kind](rng)
        if is_held_out(example):
            found.setdefault(example.prompt, example)
        if len(found) == size:
            break
    return list(found.values())
