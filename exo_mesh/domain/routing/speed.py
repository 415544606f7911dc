"""The speed of an instance as an entry peer has measured it: seconds per token of a prompt and of an answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

KEPT = 0.97
"""Weight that older samples keep with each new sample: about the last 30 samples count, so that a change of speed is
learnt within one or two answers."""

OUTLIER = 3.0
"""A sample counts at most this many times the known value: one interrupted step says nothing about the others."""

USUAL_SLOPE, USUAL_WEIGHT = 0.05, 1.0
"""While the number of requests hardly changes, each further request is taken to make a step longer by this share, so
that a burst is spread over instances of similar speed. Measured steps prevail as soon as the variance of the number of
requests is above the weight."""

LEAST_PART = 0.125
"""The line never goes below this part of the mean step, whatever noisy samples say of its slope."""

HALF_LIFE_S = 600.0
"""A measured time is halved after this time without a new sample: an instance that was slow once is tried again, a
twice as slow one after ten minutes."""

MAX_INSTANCES = 256
"""Most instances, and models, with kept figures; the oldest figures are dropped first."""

FIRST_OUTPUT_TOKENS = 256.0
"""Expected length of an answer of a model that has not answered yet."""

OUTPUT_KEPT = 0.9
"""Weight of the older answers of a model in their mean length."""


class StepLine:
    """Seconds between two tokens of one answer as a line over the number of requests at the instance, fitted to samples
    with least squares; older samples count less."""

    def __init__(self) -> None:
        self._weight = self._n = self._s = self._nn = self._ns = 0.0

    def __bool__(self) -> bool:
        return self._weight > 0

    def add(self, requests: int, seconds: float) -> None:
        """Add a sample: requests that ran or waited, and seconds between two tokens of one of them."""
        if self:
            seconds = min(seconds, OUTLIER * self.at(requests))
        self._weight = KEPT * self._weight + 1
        self._n = KEPT * self._n + requests
        self._s = KEPT * self._s + seconds
        self._nn = KEPT * self._nn + requests * requests
        self._ns = KEPT * self._ns + requests * seconds

    def at(self, requests: float) -> float:
        """Seconds at this number of requests; never below a part of the mean, and 0 without a sample."""
        if not self:
            return 0.0
        mean_n, mean_s = self._n / self._weight, self._s / self._weight
        variance = self._nn / self._weight - mean_n * mean_n
        covariance = self._ns / self._weight - mean_n * mean_s
        slope = max(0.0, (covariance + USUAL_WEIGHT * USUAL_SLOPE * mean_s) / (variance + USUAL_WEIGHT))
        return max(LEAST_PART * mean_s, mean_s + slope * (requests - mean_n))


class Speed:
    """The measured speed of one instance with the peers that it has now."""

    def __init__(self) -> None:
        self.step = StepLine()
        self._prompt_tokens = 0.0
        self._prompt_s = 0.0
        self._sampled_at = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a first token has come from the instance."""
        return self._prompt_tokens > 0

    @property
    def prompt_token_s(self) -> float:
        """Seconds per token of a prompt; 0 without a sample."""
        return self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0.0

    def took_first(self, prompt_tokens: int, seconds: float, now: float) -> None:
        """Note a first token. prompt_tokens: of this request and of the prompts computed before it in the same time.
        seconds: from the turn of the request to its first token."""
        prefill_s = max(0.0, seconds - self.step.at(1))
        if self.is_known:
            prefill_s = min(prefill_s, OUTLIER * max(self.prompt_token_s * prompt_tokens, self.step.at(1)))
        self._prompt_tokens = KEPT * self._prompt_tokens + max(1, prompt_tokens)
        self._prompt_s = KEPT * self._prompt_s + prefill_s
        self._sampled_at = now

    def took_step(self, requests: int, seconds: float, now: float) -> None:
        """Note the mean time between tokens of one answer, while this many requests were at the instance."""
        self.step.add(max(1, requests), seconds)
        self._sampled_at = now

    def trust(self, now: float) -> float:
        """The part of the measured times that still counts; see HALF_LIFE_S."""
        return 0.5 ** (max(0.0, now - self._sampled_at) / HALF_LIFE_S) if self.is_known else 1.0


class _Kept(msgspec.Struct):
    members: tuple[str, ...]
    speed: Speed


class Speeds:
    """What this entry peer has measured: the speed of each instance, and the usual length of the answers of each
    model."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._output_tokens: dict[str, float] = {}

    def of(self, instance_id: str, members: Iterable[str]) -> Speed:
        """The speed of an instance; a new one if it has other peers than at the last call."""
        members = tuple(members)
        kept = self._kept.get(instance_id)
        if kept is None or kept.members != members:
            self._kept.pop(instance_id, None)
            kept = self._kept[instance_id] = _Kept(members, Speed())
            while len(self._kept) > MAX_INSTANCES:
                del self._kept[next(iter(self._kept))]
        return kept.speed

    def answered(self, model: str, output_tokens: int) -> None:
        """Note the length of an answer."""
        known = self._output_tokens.pop(model, float(output_tokens))
        self._output_tokens[model] = OUTPUT_KEPT * known + (1 - OUTPUT_KEPT) * output_tokens
        while len(self._output_tokens) > MAX_INSTANCES:
            del self._output_tokens[next(iter(self._output_tokens))]

    def output_tokens(self, model: str, max_tokens: int, emitted: int = 0) -> float:
        """Tokens that an answer is still expected to have after `emitted` ones; at most max_tokens in all. An answer
        that is longer than usual is expected to go on for a quarter of the usual length."""
        usual = self._output_tokens.get(model, FIRST_OUTPUT_TOKENS)
        return max(0.0, min(max(usual - emitted, usual / 4), float(max_tokens - emitted)))
