"""Measures the share of held-out questions that the model answers exactly: `python -m tools.demo_model.evaluate`.

A greedy answer is exactly right if and only if, after the question and every correct part of the answer, the most
likely next token is the correct one, including the end of the turn. So one forward pass over question and right
answer decides each case; `--generate` also asks mlx-lm to generate some of the answers token by token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch

from tools.demo_model.batches import collate, group_by_length
from tools.demo_model.conversations import (
    SYSTEM_MESSAGES,
    Conversation,
    Encoded,
    chat_prompt,
    encode_answer,
    encode_conversation,
)
from tools.demo_model.example import Example
from tools.demo_model.export import SHIPPED
from tools.demo_model.model import DemoModel
from tools.demo_model.skills import SKILLS, skill_set
from tools.demo_model.tasks import TESTED, draw_mixed, held_out_set

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@torch.no_grad()
def right_answers(model: DemoModel, cases: list[Encoded], tokens: int = 8000) -> list[bool]:
    """Returns for each case (question and right answer) whether the greedy answer is exactly right."""
    numbered = [(ids, marks, i) for i, (ids, marks) in enumerate(cases)]
    right = [False] * len(cases)
    for group in group_by_length(numbered, tokens):  # type: ignore[arg-type]
        ids, places, targets = collate([(case[0], case[1]) for case in group])
        hits = model(ids, places).argmax(-1) == targets
        misses = set((places[~hits] // ids.shape[1]).tolist())
        for row, case in enumerate(group):
            right[case[2]] = row not in misses
    return right


def in_conversation(example: Example, rng: Random) -> str:
    """Puts the question after a system message, one earlier turn, or both."""
    system = rng.choice(SYSTEM_MESSAGES) if rng.random() < 0.67 else None
    earlier = (draw_mixed(rng),) if system is None or rng.random() < 0.5 else ()
    return chat_prompt(example.prompt, system, earlier)


def accuracy(
    model: DemoModel, tokenizer: Tokenizer, kind: str, size: int, seed: int = 1, conversation: bool = False
) -> tuple[int, int, list[Example]]:
    """Returns right answers, questions asked, and the questions answered wrongly, for one kind."""
    examples, rng = held_out_set(kind, size, seed), Random(f"conversation {kind}")
    contexts = [in_conversation(e, rng) if conversation else chat_prompt(e.prompt) for e in examples]
    cases = [encode_answer(tokenizer, c, e.answer, e.given) for c, e in zip(contexts, examples, strict=True)]
    right = right_answers(model, cases)
    wrong = [e for e, ok in zip(examples, right, strict=True) if not ok]
    return sum(right), len(right), wrong


def skill_accuracy(
    model: DemoModel, tokenizer: Tokenizer, skill: str, size: int, seed: int = 1
) -> tuple[int, int, list[Conversation]]:
    """Returns right answers, conversations tried, and those answered wrongly, for one skill with tools or thoughts."""
    drawn = skill_set(skill, size, seed)
    right = right_answers(model, [encode_conversation(tokenizer, one, only_last=True) for one in drawn])
    wrong = [one for one, ok in zip(drawn, right, strict=True) if not ok]
    return sum(right), len(right), wrong


def load(directory: Path) -> tuple[DemoModel, Tokenizer]:
    """Loads the exported model and its tokenizer."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    model = DemoModel()
    model.load_state_dict(load_file(str(directory / "model.safetensors")))
    return model.eval(), Tokenizer.from_file(str(directory / "tokenizer.json"))


def generate_with_mlx(directory: Path, per_kind: int) -> list[tuple[Example, str]]:
    """Generates mlx-lm's greedy answers to the first held-out questions of each kind."""
    from mlx_lm import generate
    from mlx_lm import load as load_mlx

    model, tokenizer = load_mlx(str(directory))
    answers = []
    for example in (e for kind in TESTED for e in held_out_set(kind)[:per_kind]):
        message = [{"role": "user", "content": example.prompt}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, enable_thinking=False)
        answers.append((example, generate(model, tokenizer, prompt, max_tokens=1000)))
    return answers


def main() -> None:
    """Prints the accuracy per kind; with --card, writes it into the model card too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--size", type=int, default=1000, help="held-out questions of each kind, at most")
    parser.add_argument("--generate", type=int, default=0, help="answers of each kind to generate with mlx-lm")
    parser.add_argument("--card", action="store_true", help="write the results into the model card")
    parser.add_argument("--show", type=int, default=3, help="wrong questions to show of each kind")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    results: dict[str, dict[str, int]] = {}
    for kind in TESTED:
        alone, asked, wrong = accuracy(model, tokenizer, kind, options.size)
        among, _, _ = accuracy(model, tokenizer, kind, options.size, conversation=True)
        results[kind] = {"asked": asked, "right": alone, "right_in_conversation": among}
        print(kind, json.dumps(results[kind]), [e.prompt for e in wrong[: options.show]], flush=True)
    for skill in SKILLS:
        right, tried, failed = skill_accuracy(model, tokenizer, skill, options.size)
        results[skill] = {"asked": tried, "right": right}
        shown = [(one.turns[-1].prompt, one.turns[-1].answer) for one in failed[: options.show]]
        print(skill, json.dumps(results[skill]), shown, flush=True)
    if options.generate:
        answers = generate_with_mlx(options.model, options.generate)
        same = sum(text == example.answer for example, text in answers)
        print(f"generated with mlx-lm: {same} of {len(answers)} exactly right")
    if options.card:
        from tools.demo_model.card import write_card

        write_card(options.model, results)


if __name__ == "__main__":
    main()
