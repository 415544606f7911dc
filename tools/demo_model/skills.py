"""Held-out conversations with tools and with thoughts, to measure more than the plain questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from tools.demo_model.conversations import Conversation
from tools.demo_model.example import Example, is_held_out
from tools.demo_model.tasks import TEST_DRAWS, TESTED, TOOL_WEIGHTS, fits
from tools.demo_model.tool_tasks import TOOL_DRAWS
from tools.demo_model.tools_known import DECOY, RECORD, SUM, WEATHER, KnownTool, draw_kit


def draw_held_out(draw: Callable[[], Example]) -> Example:
    """Draws until a question is held out."""
    while not is_held_out(example := draw()):
        pass
    return example


def plain_question(rng: Random) -> Example:
    """Draws a held-out question of any kind that needs no tool."""
    kind = rng.choice(TESTED)
    return draw_held_out(lambda: TEST_DRAWS[kind](rng))


def call(family: str, rng: Random) -> Conversation:
    """Draws a question that one of the offered tools answers."""
    asked = result(family, rng)
    return replace(asked, turns=[replace(asked.turns[0], results=())])


def result(family: str, rng: Random) -> Conversation:
    """Draws the same after the tool has answered."""
    kit = draw_kit(rng, family)
    tool = next(tool for tool in kit if tool.family == family)
    return Conversation(None, [draw_held_out(lambda: TOOL_DRAWS[family](rng, tool))], kit)


def no_tool(rng: Random) -> Conversation:
    """Draws a question that none of the offered tools answers."""
    while True:
        kit: tuple[KnownTool, ...] = draw_kit(rng, rng.choice((WEATHER, SUM, RECORD, DECOY)))
        example = plain_question(rng)
        if not fits(example, kit):
            return Conversation(None, [example], kit)


def thought(rng: Random) -> Conversation:
    """Draws any question, with a thought before the answer or the call."""
    if rng.random() < 0.5:
        return Conversation(None, [plain_question(rng)], thinking=True)
    return replace(call(rng.choice(tuple(TOOL_WEIGHTS)), rng), thinking=True)


SKILLS: dict[str, Callable[[Random], Conversation]] = {
    "call weather": lambda rng: call(WEATHER, rng),
    "call add": lambda rng: call(SUM, rng),
    "call a record": lambda rng: call(RECORD, rng),
    "weather result": lambda rng: result(WEATHER, rng),
    "add result": lambda rng: result(SUM, rng),
    "no tool fits": no_tool,
    "thought": thought,
}


def skill_set(skill: str, size: int, seed: int = 1) -> list[Conversation]:
    """Returns `size` held-out conversations, the same on every machine."""
    rng = Random(f"skill {skill} {seed}")
    return [SKILLS[skill](rng) for _ in range(size)]
