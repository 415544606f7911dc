"""Spelling a word and reversing a word."""

from __future__ import annotations

from random import Random

from tools.demo_model.example import Example
from tools.demo_model.tokenizer import WORDS
from tools.demo_model.word_lists import ENGLISH

SPELL = (
    "Spell {w}.",
    "Spell {w}.",
    "Spell {w}",
    "spell {w}",
    "Spell the word {w}.",
    "Please spell {w}.",
    "How do you spell {w}?",
    "Can you spell {w}?",
    "Now spell {w}.",
    "Spell: {w}",
    'Spell "{w}".',
)
REVERSE = (
    "Reverse {w}.",
    "Reverse {w}.",
    "Reverse {w}",
    "reverse {w}",
    "Reverse the word {w}.",
    "Please reverse {w}.",
    "Can you reverse {w}?",
    "Now reverse {w}.",
    "Reverse: {w}",
    "Say {w} backwards.",
    'Reverse "{w}".',
)
CONSONANTS = "bcdfghjklmnpqrstvwxyz"
VOWELS = "aeiou"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Words that are one token carry no letters to copy: their spelling is memorised, so none is held out.
ONE_TOKEN_WORDS = tuple(sorted({w.strip().lower() for w in WORDS if w.strip().isalpha() and 2 <= len(w.strip()) <= 8}))
REAL_WORDS = tuple(w for w in ENGLISH if 2 <= len(w) <= 8)


def pseudo_word(rng: Random) -> str:
    """Makes up a word of 2 to 8 letters, mostly with alternating vowels and consonants."""
    size = rng.randint(2, 8)
    if rng.random() < 0.4:
        return "".join(rng.choice(LETTERS) for _ in range(size))
    start = rng.randint(0, 1)
    return "".join(rng.choice(VOWELS if (i + start) % 2 else CONSONANTS) for i in range(size))


def draw_word(rng: Random) -> str:
    """Draws a word to spell or reverse: real, made up, or one of the tokenizer's whole words."""
    roll = rng.random()
    word = pseudo_word(rng) if roll >= 0.35 else rng.choice(REAL_WORDS if roll >= 0.12 else ONE_TOKEN_WORDS)
    case = rng.random()
    return word.upper() if case < 0.04 else word.capitalize() if case < 0.14 else word


def word_example(kind: str, word: str, template: str) -> Example:
    """Returns the question and answer for one word; `kind` is spell or reverse."""
    answer = "-".join(word) if kind == "spell" else word[::-1]
    known = word.lower() in ONE_TOKEN_WORDS
    return Example(kind, "other" if known else "word", word.lower(), template.format(w=word), answer)


def draw_spell(rng: Random) -> Example:
    """Draws a word to spell, letter by letter with hyphens."""
    return word_example("spell", draw_word(rng), rng.choice(SPELL))


def draw_reverse(rng: Random) -> Example:
    """Draws a word to write backwards."""
    return word_example("reverse", draw_word(rng), rng.choice(REVERSE))
