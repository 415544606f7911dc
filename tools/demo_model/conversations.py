"""Conversations of one to three turns in the chat form, as token ids with the places where loss is taken."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tools.demo_model.example import Example
from tools.demo_model.tasks import draw_mixed
from tools.demo_model.tokenizer import TURN_END

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly and helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are helpful.",
    "Be brief.",
    "Be brief and kind.",
    "You are exo-mesh-demo, a tiny model.",
    "You are a chat bot. Be polite and answer in one sentence.",
    "Answer the question of the user.",
)
Encoded = tuple[list[int], list[bool]]  # token ids, and for each id whether the model must predict it


def chat_prompt(prompt: str, system: str | None = None, earlier: tuple[Example, ...] = ()) -> str:
    """The chat text up to the place where the assistant answers `prompt`."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n" if system is not None else ""
    for turn in earlier:
        text += f"<|im_start|>user\n{turn.prompt}<|im_end|>\n<|im_start|>assistant\n{turn.answer}<|im_end|>\n"
    return f"{text}<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def encode_answer(tokenizer: Tokenizer, context: str, answer: str) -> Encoded:
    """`context` followed by `answer` and the end of the turn; loss on the latter two only."""
    before = tokenizer.encode(context).ids
    after = tokenizer.encode(answer + TURN_END).ids
    return before + after, [False] * len(before) + [True] * len(after)


def encode_conversation(tokenizer: Tokenizer, turns: list[Example], system: str | None) -> Encoded:
    """A whole conversation; loss on every answer and the end of its turn."""
    ids: list[int] = []
    marks: list[bool] = []
    for i, turn in enumerate(turns):
        context = ("\n" if i else "") + chat_prompt(turn.prompt, system if i == 0 else None)
        more_ids, more_marks = encode_answer(tokenizer, context, turn.answer)
        ids += more_ids
        marks += more_marks
    return ids, marks


def draw_context(rng: Random, weights: dict[str, float] | None = None) -> tuple[str | None, list[Example]]:
    """A system message (about one time in six) and one to three turns."""
    system = rng.choice(SYSTEM_MESSAGES) if rng.random() < 0.17 else None
    turns = rng.choices((1, 2, 3), (0.6, 0.25, 0.15))[0]
    return system, [draw_mixed(rng, weights) for _ in range(turns)]
