"""Splits a request for several answers into one request for each, and selects the best answers."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from msgspec.structs import replace

from exo_mesh.domain.request import GenerateRequest


def fan_out(request: GenerateRequest, num_choices: int) -> list[GenerateRequest]:
    """One request for each choice. They share the prompt's prefill if they run on one ring at the same time.

    Choice 0 is the request itself: it yields what it would yield alone, and only it returns `prompt_logprobs`. The ids,
    seeds and idempotency keys of the others are derived from it.
    """
    if num_choices < 1:
        raise ValueError(f"{num_choices} choices")
    if num_choices == 1:
        return [request]
    first = dataclasses.replace(request, share_id=request.request_id)
    return [first, *(_choice(first, index) for index in range(1, num_choices))]


def choice_seed(seed: int, index: int) -> int:
    """The seed of a choice: 64 bits that depend on (seed, index); choice 0 has the request's own."""
    if not index:
        return seed
    text = f"exo-mesh choice {index} of seed {seed}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def best_choices(logprobs: Sequence[Sequence[float]], num_best: int) -> list[int]:
    """The indexes of the answers with the highest mean log-probability per token, best first; among equals the first.

    logprobs: for each answer, those of its tokens; an answer without tokens comes last.
    """
    means = [sum(tokens) / len(tokens) if tokens else float("-inf") for tokens in logprobs]
    return sorted(range(len(means)), key=lambda index: -means[index])[:num_best]


def _choice(first: GenerateRequest, index: int) -> GenerateRequest:
    key_hash = first.key_hash and hashlib.sha256(first.key_hash + index.to_bytes(4, "big")).digest()
    return dataclasses.replace(
        first,
        request_id=f"{first.request_id}-{index}",
        span_id="",
        sampling=replace(first.sampling, seed=choice_seed(first.sampling.seed, index)),
        key_hash=key_hash,
        prompt_logprobs=None,
    )
