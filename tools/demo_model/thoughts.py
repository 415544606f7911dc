"""The thought before an answer, for requests with thinking: one short line that prepares the answer."""

from __future__ import annotations

from tools.demo_model.days_tasks import DAYS
from tools.demo_model.example import Example

FIXED = {
    "repeat": "I must say the same again.",
    "identity": "The user talks to me.",
    "other": "I do not know this.",
}


def thought_of(example: Example) -> str:
    """Returns the thought before the answer to this question."""
    if example.thought:
        return example.thought
    if example.kind in FIXED:
        return FIXED[example.kind]
    if example.kind == "count":
        return thought_of_count(example)
    if example.kind in ("add", "subtract"):
        return thought_of_sum(example.answer)
    if example.kind == "days_months":
        return "The user asks for " + ("days." if any(day in example.answer for day in DAYS) else "months.")
    word = example.answer.replace("-", "") if example.kind == "spell" else example.answer[::-1]
    return "The letters are " + " ".join(word) + "."


def thought_of_count(example: Example) -> str:
    """Says where counting starts and in which direction it goes."""
    first, last = example.key.split(",")
    way = "up" if int(first) < int(last) else "down"
    return f"From {first} to {last}: {way}." if first != last else f"Only {first}."


def thought_of_sum(answer: str) -> str:
    """Gives the steps of an addition, or the sign of a difference."""
    a, sign, b = answer.split(" = ")[0].split(" ")
    if sign == "-":
        return f"{a} is smaller than {b}." if int(a) < int(b) else f"{a} is not smaller than {b}."
    tens, ones = int(a) // 10 * 10 + int(b) // 10 * 10, int(a) % 10 + int(b) % 10
    return f"{int(a) // 10 * 10} + {int(b) // 10 * 10} = {tens}, {int(a) % 10} + {int(b) % 10} = {ones}."
