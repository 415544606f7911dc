"""Counting, adding and subtracting."""

from __future__ import annotations

from random import Random

from tools.demo_model.example import Example

LARGEST = 199  # counting runs between 0 and this number

COUNT_ANY = (
    "Count from {a} to {b}.",
    "Count from {a} to {b}.",
    "Count from {a} to {b}.",
    "Count from {a} to {b}",
    "count from {a} to {b}",
    "count from {a} to {b}.",
    "Please count from {a} to {b}.",
    "please count from {a} to {b}",
    "Can you count from {a} to {b}?",
    "Could you count from {a} to {b}, please?",
    "Now count from {a} to {b}.",
    "Count {a} to {b}.",
    "Count the numbers from {a} to {b}.",
    "Start at {a} and count to {b}.",
    "List the numbers from {a} to {b}.",
)
COUNT_UP = (
    "Count up from {a} to {b}.",
    "count up from {a} to {b}",
    "Count from {a} up to {b}.",
    "Please count up from {a} to {b}.",
)
COUNT_DOWN = (
    "Count down from {a} to {b}.",
    "count down from {a} to {b}",
    "Count from {a} down to {b}.",
    "Please count down from {a} to {b}.",
    "Count backwards from {a} to {b}.",
)
ADD = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "what is {a} + {b}",
    "What's {a} + {b}?",
    "What's {a} plus {b}?",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "{a} + {b}",
    "{a} + {b} =",
    "{a}+{b}",
    "{a} + {b}?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "Please add {a} and {b}.",
)
SUBTRACT = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "what is {a} - {b}",
    "What's {a} - {b}?",
    "What's {a} minus {b}?",
    "How much is {a} - {b}?",
    "How much is {a} minus {b}?",
    "{a} - {b}",
    "{a} - {b} =",
    "{a}-{b}",
    "{a} - {b}?",
    "Subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "Please subtract {b} from {a}.",
)


def count_answer(first: int, last: int) -> str:
    """Returns all whole numbers from `first` to `last`, up or down, joined by a comma and a space."""
    step = 1 if last >= first else -1
    return ", ".join(str(n) for n in range(first, last + step, step))


def count_example(first: int, last: int, rng: Random) -> Example:
    """Returns a counting question for two numbers, in words drawn from `rng`."""
    directed = COUNT_UP if first < last else COUNT_DOWN if first > last else COUNT_ANY
    template = rng.choice(COUNT_ANY if rng.random() < 0.7 else directed)
    return Example("count", "count", f"{first},{last}", template.format(a=first, b=last), count_answer(first, last))


def draw_count(rng: Random) -> Example:
    """Draws a counting question for training: short stretches, which teach where to stop, and long ones."""
    first = rng.randint(0, LARGEST)
    roll = rng.random()
    if roll < 0.12:
        first, last = rng.randint(0, 12), rng.randint(0, 60)
    elif roll < 0.60:
        reach = rng.choice((2, 4, 9, 14, 25, 45))
        last = min(LARGEST, max(0, first + rng.randint(-reach, reach)))
    else:
        last = rng.randint(0, LARGEST)
    if rng.random() < 0.3 and last < first:
        first, last = last, first
    return count_example(first, last, rng)


def draw_uniform_count(rng: Random) -> Example:
    """Draws a counting question for testing: both ends uniform over the whole range."""
    return count_example(rng.randint(0, LARGEST), rng.randint(0, LARGEST), rng)


def draw_add(rng: Random) -> Example:
    """Draws an addition of two numbers under 100; a + b and b + a share one key."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    prompt = rng.choice(ADD).format(a=a, b=b)
    return Example("add", "add", f"{min(a, b)},{max(a, b)}", prompt, f"{a} + {b} = {a + b}")


def draw_subtract(rng: Random) -> Example:
    """Draws a subtraction of two numbers under 100; the difference may be negative."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    prompt = rng.choice(SUBTRACT).format(a=a, b=b)
    return Example("subtract", "subtract", f"{a},{b}", prompt, f"{a} - {b} = {a - b}")
