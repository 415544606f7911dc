"""Log-probabilities of prompt tokens, from the logits of prefill rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from exo_mesh.domain.request import PromptLogprob, PromptLogprobs, TokenLogprob
from exo_mesh.errors import EngineError
from exo_mesh.rings.runner.sampling.sampler import largest

MAX_LOGITS_BYTES = 64 * 2**20
"""Bytes of prompt logits in one frame: float32 rows of the whole vocabulary, which the last stage holds at once. 110
rows of 152,000 tokens."""

UNKNOWN_VOCABULARY = 2**20
"""Assumed size of the vocabulary until the first logits have come: that allows 16 rows."""

BLOCK = 256
"""Tokens of the vocabulary per block; the maximum of each block is computed before the most likely tokens are
searched."""

AT_ONCE = 128
"""Prompt tokens of one message: with 20 alternatives each that is about 40 KiB."""


def max_logit_rows(vocab_size: int = UNKNOWN_VOCABULARY) -> int:
    """The most rows of prompts whose logits one frame may ask for."""
    return max(1, MAX_LOGITS_BYTES // (4 * vocab_size))


def score(logits: npt.NDArray[np.float32], token_ids: Sequence[int], first: int, num_top: int) -> list[PromptLogprob]:
    """The log-probabilities of consecutive prompt tokens, beginning at index `first`.

    logits: `[len(token_ids), vocab]`, each row of the position before its token. Raises EngineError if they hold NaN or
    +inf, or if a token is not in the vocabulary.
    """
    return [
        _score_one(row, token_id, first + place, num_top)
        for place, (row, token_id) in enumerate(zip(logits, token_ids, strict=True))
    ]


def _score_one(logits: npt.NDArray[np.float32], token_id: int, index: int, num_top: int) -> PromptLogprob:
    best = float(logits.max())
    if not np.isfinite(best):
        raise EngineError(f"the logits before prompt token {index} hold NaN or infinity")
    if token_id >= logits.size:
        raise EngineError(f"prompt token {index} is {token_id}, but the model has {logits.size} tokens")
    # NumPy adds float32 pairwise: the sum is exact to about 1e-6, and takes a quarter of the time of float64
    shifted = logits - np.float32(best)
    log_sum = best + float(np.log(np.exp(shifted, out=shifted).sum()))
    ids = _likeliest(logits, num_top)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    top = tuple(TokenLogprob(int(i), float(logits[i]) - log_sum) for i in ids)
    return PromptLogprob(index, float(logits[token_id]) - log_sum, top)


def _likeliest(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """The same as `sampler.largest`, in a third of the time: searches only blocks of the vocabulary with a large enough
    maximum."""
    if not count:
        return np.zeros(0, np.intp)
    num_blocks = logits.size // BLOCK
    if count >= num_blocks:
        return largest(logits, count)
    peaks = logits[: num_blocks * BLOCK].reshape(num_blocks, BLOCK).max(axis=1)
    blocks = np.flatnonzero(peaks >= np.partition(peaks, num_blocks - count)[num_blocks - count])
    rest = np.arange(num_blocks * BLOCK, logits.size)
    ids = np.concatenate([(blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1), rest])
    found: npt.NDArray[np.intp] = ids[largest(logits[ids], count)]
    return found


def pieces(entries: Sequence[PromptLogprob]) -> Iterator[PromptLogprobs]:
    """Split the entries into parts that fit one message each."""
    for start in range(0, len(entries), AT_ONCE):
        yield PromptLogprobs(tuple(entries[start : start + AT_ONCE]))
