"""Repeating a given sentence exactly, with accents, other scripts and emoji."""

from __future__ import annotations

from random import Random

from tools.demo_model.days_tasks import DAYS, MONTHS
from tools.demo_model.example import Example
from tools.demo_model.tokenizer import WORDS
from tools.demo_model.word_lists import CJK, ENGLISH, SENTENCE_WORDS, SYMBOLS
from tools.demo_model.word_tasks import ONE_TOKEN_WORDS, pseudo_word

MOST_BYTES = 60
REPEAT = (
    "Repeat: {s}",
    "Repeat: {s}",
    "Repeat: {s}",
    "repeat: {s}",
    "Repeat after me: {s}",
    "Please repeat: {s}",
    "Repeat this: {s}",
    "Repeat the sentence: {s}",
    "Say: {s}",
    "Now repeat: {s}",
)
STOPS = (".", ".", "!", "?", "", "", "", "...", ")", " ;-)")
# Letters outside ASCII, one per non-ASCII word, so that new combinations occur too.
FOREIGN = tuple(sorted({c for w in SENTENCE_WORDS for c in w if ord(c) > 127}))


def foreign_word(rng: Random) -> str:
    """Makes up a word that mixes plain and accented letters."""
    word = list(pseudo_word(rng))
    for _ in range(rng.randint(1, 2)):
        word[rng.randrange(len(word))] = rng.choice(FOREIGN)
    return "".join(word)


def draw_piece(rng: Random) -> str:
    """Draws one word, number or symbol of a sentence."""
    roll = rng.random()
    if roll < 0.34:
        return rng.choice(ENGLISH)
    if roll < 0.46:
        return rng.choice(ONE_TOKEN_WORDS + DAYS + MONTHS)
    if roll < 0.60:
        return rng.choice(SENTENCE_WORDS)
    if roll < 0.68:
        return "".join(rng.choice(CJK) for _ in range(rng.randint(1, 2)))
    if roll < 0.76:
        return rng.choice(SYMBOLS)
    if roll < 0.82:
        return str(rng.randint(0, 10 ** rng.randint(1, 5)))
    return foreign_word(rng) if roll < 0.87 else pseudo_word(rng)


def draw_sentence(rng: Random) -> str:
    """Draws a sentence of at most `MOST_BYTES` bytes of UTF-8."""
    limit = rng.randint(4, MOST_BYTES)
    text = rng.choice(WORDS).strip() if rng.random() < 0.4 else draw_piece(rng)
    if rng.random() < 0.6:
        text = text[:1].upper() + text[1:]
    for _ in range(rng.randint(0, 11)):
        gap = ", " if rng.random() < 0.08 else " - " if rng.random() < 0.02 else " "
        longer = text + gap + draw_piece(rng)
        if len(longer.encode()) > limit:
            break
        text = longer
    whole = text + rng.choice(STOPS)
    return whole if len(whole.encode()) <= MOST_BYTES else text


def draw_repeat(rng: Random) -> Example:
    """Draws a sentence to repeat; sentences are held out."""
    sentence = draw_sentence(rng)
    prompt = rng.choice(REPEAT).format(s=sentence)
    return Example("repeat", "repeat", sentence, prompt, sentence)
