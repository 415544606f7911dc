"""The days of the week, the months of the year, and their neighbours."""

from __future__ import annotations

from random import Random

from tools.demo_model.example import Example

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
NEIGHBOUR = (
    "What {unit} comes {side} {x}?",
    "What {unit} comes {side} {x}?",
    "Which {unit} comes {side} {x}?",
    "what {unit} comes {side} {x}",
    "which {unit} comes {side} {x}",
    "What {unit} is {side} {x}?",
    "Which {unit} is {side} {x}?",
    "What comes {side} {x}?",
    "what comes {side} {x}",
    "Name the {unit} {side} {x}.",
    "Tell me the {unit} {side} {x}.",
    "Please name the {unit} {side} {x}.",
    "What is the {unit} {side} {x}?",
    "Which {unit} comes right {side} {x}?",
    "Do you know which {unit} comes {side} {x}?",
    "Can you name the {unit} {side} {x}?",
    "And what {unit} comes {side} {x}?",
)
BETWEEN = (
    "What {unit} is between {x} and {y}?",
    "Which {unit} is between {x} and {y}?",
    "Which {unit} comes between {x} and {y}?",
    "Name the {unit} between {x} and {y}.",
)
START = (
    "Name the {unit}s of the {whole}, starting with {x}.",
    "List the {unit}s of the {whole}, starting with {x}.",
    "Start with {x} and name the {unit}s of the {whole}.",
)
LIST_ALL = (
    "Name the {unit}s of the {whole}.",
    "List the {unit}s of the {whole}.",
    "What are the {unit}s of the {whole}?",
    "name the {unit}s of the {whole}",
    "list the {unit}s of the {whole}",
    "what are the {unit}s of the {whole}",
    "Please name the {unit}s of the {whole}.",
    "Tell me the {unit}s of the {whole}.",
    "Can you name the {unit}s of the {whole}?",
    "Name all {unit}s of the {whole}.",
    "Name all the {unit}s of the {whole}.",
)


def draw_days_months(rng: Random) -> Example:
    """Draws a question about days or months; pairs of a template and an item are held out."""
    months = rng.random() < 0.6
    names, unit, whole = (MONTHS, "month", "year") if months else (DAYS, "day", "week")
    at = rng.randrange(len(names))
    here, following, later = (names[(at + i) % len(names)] for i in range(3))
    roll = rng.random()
    if roll < 0.7:
        side = rng.choice(("after", "before"))
        found = following if side == "after" else names[at - 1]
        template, answer = rng.choice(NEIGHBOUR), f"{found} comes {side} {here}."
        prompt = template.format(unit=unit, side=side, x=here)
    elif roll < 0.83:
        template, answer = rng.choice(BETWEEN), f"{following} is between {here} and {later}."
        prompt = template.format(unit=unit, x=here, y=later)
    elif roll < 0.92:
        template, answer = rng.choice(START), ", ".join(names[at:] + names[:at]) + "."
        prompt = template.format(unit=unit, whole=whole, x=here)
    else:
        template, answer = rng.choice(LIST_ALL), ", ".join(names) + "."
        prompt = template.format(unit=unit, whole=whole)
        return Example("days_months", "other", prompt, prompt, answer)  # with two items only, none is held out
    return Example("days_months", "days_months", prompt, prompt, answer)
