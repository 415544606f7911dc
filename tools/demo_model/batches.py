"""Training batches: conversations of similar length, padded to one another."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tools.demo_model.conversations import Encoded, draw_context, encode_conversation

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Batch = tuple[Tensor, Tensor, Tensor]  # ids, flattened positions that predict, the ids to predict there
POOL = 1500  # conversations that are sorted by length together
LONG = 64  # tokens to predict; longer conversations are mostly cut


def collate(conversations: list[Encoded]) -> Batch:
    """Pads conversations on the right; `places` index the flattened ids one before each id to predict."""
    longest = max(len(ids) for ids, _ in conversations)
    ids = torch.zeros(len(conversations), longest, dtype=torch.long)
    marks = torch.zeros(len(conversations), longest, dtype=torch.bool)
    for row, (row_ids, row_marks) in enumerate(conversations):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        marks[row, : len(row_marks)] = torch.tensor(row_marks)
    places = marks.flatten().nonzero().squeeze(1)
    return ids, places - 1, ids.flatten()[places]


def group_by_length(conversations: list[Encoded], tokens: int) -> list[list[Encoded]]:
    """Groups conversations of similar length with at most `tokens` padded tokens each (at least one conversation)."""
    groups: list[list[Encoded]] = [[]]
    for conversation in sorted(conversations, key=lambda c: len(c[0])):
        if groups[-1] and (len(groups[-1]) + 1) * len(conversation[0]) > tokens:
            groups.append([])
        groups[-1].append(conversation)
    return groups


def shorten(conversation: Encoded, rng: Random) -> Encoded:
    """Cuts most long answers: long counting decides its direction early, and the rest repeats the pattern."""
    ids, marks = conversation
    if sum(marks) <= LONG or rng.random() < 0.25:
        return conversation
    keep = rng.randint(LONG // 2, LONG)
    end = next(i for i, seen in enumerate(accumulate(marks), 1) if seen == keep)
    return ids[:end], marks[:end]


def training_batches(
    tokenizer: Tokenizer, seed: int, tokens: int, weights: dict[str, float] | None = None
) -> Iterator[Batch]:
    """Yields batches without end, each of about `tokens` tokens."""
    rng = Random(seed)
    while True:
        pool = [shorten(encode_conversation(tokenizer, draw_context(rng, weights)), rng) for _ in range(POOL)]
        groups = group_by_length(pool, tokens)
        rng.shuffle(groups)
        yield from map(collate, groups)
