"""The one sampler of the driver: logits in, token out, the same for every engine.

Order: mask tokens that a grammar does not allow, logit_bias, repetition (prompt + output, or the last tokens of them),
presence and frequency (output), mask stop ids until min_tokens; then greedy, or temperature, top_k, top_p, min_p and
one draw. The random number depends only on (seed, position), so a seed gives the same text whatever the split, the
batch, the drafts or the replay.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from exo_mesh.domain.request import GenerateRequest, SamplingParams, TokenLogprob
from exo_mesh.errors import EngineError, InputError
from exo_mesh.rings.runner.sampling.nucleus import from_border, nucleus, nucleus_of
from exo_mesh.rings.runner.sampling.weights_of_logits import Doubles, Floats, Ids, index_at, likely, uniform, weights_of


class Draw(NamedTuple):
    """One drawn token. logprob and top are filled only if the request wants logprobs."""

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Sampler:
    """Draws the tokens of one request, in order. Holds the state that penalties and min_tokens need."""

    def __init__(self, request: GenerateRequest) -> None:
        """Start with the tokens that the request resumes after, as if they had been drawn here."""
        self._params = params = request.sampling
        self._history = _History(params, request.prompt_ids, request.resume_ids)
        self._stop_ids = np.array(sorted(request.stop_ids), dtype=np.intp)
        self._min_tokens = request.min_tokens
        self._bias_ids = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.intp)
        self._biases = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)

    def draw(self, logits: Floats, position: int, allowed: npt.NDArray[np.bool_] | None = None) -> Draw:
        """Draw the next output token and remember it.

        logits: `[vocab]`, any float dtype, not changed. position: index of the token among the output. allowed: by id,
        whether a token may come; ids beyond its end may not. None: any token may come.

        Raises EngineError if the logits hold NaN or +inf, or leave no token; InputError if logit_bias names an unknown
        token.
        """
        if logits.ndim != 1 or not logits.size:
            raise EngineError(f"the engine returned logits of shape {logits.shape}, not [vocab]")
        raw_best = _best(logits, "the engine's logits")
        adjusted = self._adjust(logits, allowed, raw_best)
        after = "the logits after grammar, bias, penalties and min_tokens"
        best = raw_best if adjusted is logits else _best(adjusted, after)
        token_id = best if self._params.temperature == 0 else self._sample(adjusted, best, position)
        self._history.add(token_id)
        if self._params.logprobs is None:
            return Draw(token_id)
        return _with_logprobs(token_id, logits, raw_best, self._params.logprobs)

    def add(self, token_id: int) -> None:
        """Record an output token that was not drawn because no other could come."""
        self._history.add(token_id)

    def _adjust(self, logits: Floats, allowed: npt.NDArray[np.bool_] | None, best: int) -> Floats:
        """Grammar, bias, penalties and the mask of min_tokens, on a copy; the same array if none changes anything."""
        mask_stops = self._stop_ids.size > 0 and self._history.num_output < self._min_tokens
        if not (self._bias_ids.size or self._history.penalises or mask_stops):
            is_greedy = self._params.temperature == 0
            if allowed is None or (is_greedy and best < allowed.size and allowed[best]):
                return logits
        adjusted = logits.astype(np.float32)
        if allowed is not None:
            size = min(allowed.size, adjusted.size)
            np.copyto(adjusted[:size], -np.inf, where=~allowed[:size])
            adjusted[size:] = -np.inf
        if self._bias_ids.size:
            if int(self._bias_ids.max()) >= logits.size or int(self._bias_ids.min()) < 0:
                raise InputError(
                    f"logit_bias names token {self._bias_ids.max()}, but the model has {logits.size} tokens",
                    param="logit_bias",
                )
            np.add.at(adjusted, self._bias_ids, self._biases)
        self._history.penalise(adjusted)
        if mask_stops:
            stop_ids = self._stop_ids[self._stop_ids < logits.size]
            kept = adjusted[stop_ids]
            adjusted[stop_ids] = -np.inf
            if allowed is not None and np.isneginf(adjusted.max()):
                adjusted[stop_ids] = kept  # the grammar leaves nothing else
        return adjusted

    def _sample(self, logits: Floats, best: int, position: int) -> int:
        params = self._params
        cuts_by_sum = params.top_p < 1.0
        if cuts_by_sum and not params.top_k:
            ids = nucleus_of(logits, best, params.temperature, params.top_p)
            if ids is not None:
                return self._draw_among(ids, weights_of(logits, best, params.temperature, ids), position)
        ids = likely(logits, best, params.temperature, 0.0 if cuts_by_sum else params.min_p)
        if 0 < params.top_k < (logits.size if ids is None else ids.size):
            kept = largest(logits if ids is None else logits[ids], params.top_k)
            ids = kept if ids is None else ids[kept]
        if ids is not None and ids.size == 1:
            return best
        weights = weights_of(logits, best, params.temperature, ids)
        if cuts_by_sum:
            kept = nucleus(weights, params.top_p)
            weights = weights[kept]
            ids = kept if ids is None else ids[kept]
        return self._draw_among(ids, weights, position)

    def _draw_among(self, ids: Ids | None, weights: Doubles, position: int) -> int:
        """Apply min_p, and draw one of these tokens, of all if ids is None, by their weights."""
        params = self._params
        if params.min_p > 0.0:
            kept = np.flatnonzero(weights >= params.min_p * weights.max())
            weights = weights[kept]
            ids = kept if ids is None else ids[kept]
        # Candidates stay in the order of their ids: logits that differ in the last bit move the borders of the
        # intervals by as little, and never reorder them.
        index = index_at(weights, uniform(params.seed, position))
        return index if ids is None else int(ids[index])


class _History:
    """The prompt and output so far, as dense arrays over the vocabulary, made when a penalty first needs them."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self._repetition = params.repetition_penalty
        window = params.repetition_window if params.repetition_penalty != 1.0 else 0
        last = [*prompt_ids[-window:], *output_ids[-window:]][-window:] if window else ()
        self._last: deque[int] | None = deque(last, maxlen=window) if window else None
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self.penalises = bool(self._repetition != 1.0 or self._presence or self._frequency)
        self.num_output = len(output_ids)
        self._prompt_ids = np.array(prompt_ids if self.penalises else (), dtype=np.intp)
        self._output_ids = np.array(output_ids if self.penalises else (), dtype=np.intp)
        self._seen: npt.NDArray[np.bool_] | None = None
        self._counts: npt.NDArray[np.float32] = np.zeros(0, np.float32)

    def add(self, token_id: int) -> None:
        self.num_output += 1
        if self._last is not None:
            self._last.append(token_id)
        if self._seen is not None:
            self._seen[token_id] = True
            self._counts[token_id] += 1

    def penalise(self, logits: npt.NDArray[np.float32]) -> None:
        """Change logits in place."""
        if not self.penalises:
            return
        seen = self._dense(logits.size)
        if self._repetition != 1.0:
            ids = np.flatnonzero(seen) if self._last is None else np.unique(np.array(self._last, dtype=np.intp))
            values = logits[ids]
            logits[ids] = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._frequency:
            logits -= np.float32(self._frequency) * self._counts
        if self._presence:
            logits -= np.float32(self._presence) * (self._counts > 0)

    def _dense(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        if self._seen is None:
            ids = np.concatenate([self._prompt_ids, self._output_ids])
            if ids.size and int(ids.max()) >= vocab_size:
                raise EngineError(f"token {ids.max()} is in the prompt, but the logits are of {vocab_size} tokens")
            self._counts = np.bincount(self._output_ids, minlength=vocab_size).astype(np.float32)
            self._seen = np.zeros(vocab_size, np.bool_)
            self._seen[ids] = True
        return self._seen


def largest(values: Floats, k: int) -> Ids:
    """Indexes, ascending, of the k largest values; among equals at the border the lowest indexes win."""
    if k >= values.size:
        return np.arange(values.size)
    return from_border(values, np.partition(values, values.size - k)[values.size - k], k)


def _best(logits: Floats, what: str) -> int:
    """Index of the largest logit, the lowest among equals. NumPy's argmax stops at a NaN, so one check finds it."""
    best = int(logits.argmax())
    value = float(logits[best])
    if math.isfinite(value):
        return best
    if math.isnan(value):
        raise EngineError(f"{what} hold NaN (first at token {best})")
    if value > 0:
        raise EngineError(f"{what} hold +inf (first at token {best})")
    raise EngineError(f"{what} are all -inf: no token can be drawn")


def _with_logprobs(token_id: int, logits: Floats, best: int, num_top: int) -> Draw:
    """The log-softmax of the model's own logits: of the drawn token, and of the num_top most likely ones."""
    shifted = logits.astype(np.float64)
    shifted -= shifted[best]
    log_sum = float(np.log(np.exp(shifted).sum()))
    ids = largest(shifted, num_top) if num_top else np.zeros(0, np.intp)
    ids = ids[np.argsort(-shifted[ids], kind="stable")]
    top = tuple(TokenLogprob(int(i), float(shifted[i]) - log_sum) for i in ids)
    return Draw(token_id, float(shifted[token_id]) - log_sum, top)
