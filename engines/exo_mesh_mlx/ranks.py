"""This process as one rank of a tensor group: it joins the group, and exchanges values with the other ranks.

MLX forms a group once per process and never again: a group with other members needs new processes.
"""

from __future__ import annotations

import faulthandler
import statistics
import time
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.errors import CanaryError, RankLostError

INIT_S = 8.0
"""Seconds after which faulthandler ends the process. MLX waits for the others without a deadline and blocks all other
threads meanwhile, so this must end the process before the node gives up on its heartbeats. The ranks have just
connected to each other: one second is long."""

TIMED_REDUCES = 20
REDUCED_BYTES = 4 * 2**20
"""A prefill chunk of 512 tokens of a 4,096-wide model in bfloat16."""

AGREE_EVERY = 64
"""Forwards between two comparisons of the ranks' results: 25 us over Thunderbolt each, against a frame of 10 ms."""

AGREE_REDUCES = 3
"""All-reduces that are timed after a comparison: the first also waits for the slowest rank, the median does not."""

AGREE_WITHIN = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest difference of a share of a token's result, in units of such a share of random values. With two ranks the bits
are equal; with more, or on another chip, the order of additions may differ."""

AGREE_TOKENS, AGREE_PARTS = 32, 8


class Ranks:
    """The ranks of this process's group. All calls are collective: every rank makes them in the same order, from its
    compute thread."""

    def __init__(self, wiring: RankWiring) -> None:
        """Raises RankLostError if the group cannot be formed, or is not the group of the plan."""
        backend = "ring" if wiring.backend == "ring" else "jaccl"
        faulthandler.dump_traceback_later(INIT_S, exit=True)
        try:
            self.group = mx.distributed.init(strict=True, backend=backend)
        except (RuntimeError, ValueError) as exc:
            raise RankLostError(f"rank {wiring.rank} cannot join its tensor group: {exc}") from exc
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.rank, self.size = self.group.rank(), self.group.size()
        if (self.rank, self.size) != (wiring.rank, wiring.size):
            raise RankLostError(f"MLX made this rank {self.rank} of {self.size}, not {wiring.rank} of {wiring.size}")
        self._forwards = 0
        self.last_all_reduce_s = 0.0
        """Seconds of an all-reduce of a few bytes: measured when the group is checked, and after each comparison of
        results."""

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def all_reduce_s(self) -> float:
        """Median seconds of an all-reduce of a few bytes."""
        self.last_all_reduce_s = self._reduce_s(4, TIMED_REDUCES)
        return self.last_all_reduce_s

    def reduce_bytes_per_s(self) -> float:
        """Bytes a second of all-reduces of REDUCED_BYTES, the median."""
        return REDUCED_BYTES / self._reduce_s(REDUCED_BYTES // 4, 5)

    def _reduce_s(self, num_values: int, times: int) -> float:
        values = mx.ones((num_values,))
        mx.eval(values)
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            mx.eval(mx.distributed.all_sum(values, group=self.group))
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def of_leader(self, values: Sequence[float]) -> list[float]:
        """The values that the leader passed, on every rank."""
        mine = mx.array(list(values) if self.is_leader else [0.0] * len(values), mx.float32)
        sent = mx.distributed.all_sum(mine, group=self.group)
        mx.eval(sent)
        return [float(value) for value in np.array(sent)]

    def all_say(self, mine: bool) -> bool:
        """Whether all ranks passed true."""
        refusals = mx.distributed.all_sum(mx.array([0.0 if mine else 1.0], mx.float32), group=self.group)
        mx.eval(refusals)
        return float(np.array(refusals)[0]) == 0

    def digest(self, lines: mx.array | None, num_tokens: int) -> mx.array | None:
        """A lazy digest of each rank's result of this forward, for `check`, at every AGREE_EVERY-th call; else None.

        lines: `[tokens, width]`. The digest is float32 `[ranks, n]`: the number of the forward and its tokens, then the
        means of the parts of some tokens' values, in units of such means of random values.
        """
        self._forwards += 1
        if self._forwards % AGREE_EVERY or lines is None or not lines.size:
            return None
        some = lines[:: max(1, lines.shape[0] // AGREE_TOKENS)][:AGREE_TOKENS].astype(mx.float32)
        some = mx.where(mx.isfinite(some), some, 0.0)
        parts = min(AGREE_PARTS, some.shape[1])
        width = some.shape[1] // parts
        means = some[:, : parts * width].reshape(some.shape[0], parts, width).mean(axis=-1)
        unit = mx.rsqrt(mx.square(some).mean(axis=-1, keepdims=True) / width + 1e-30)
        counts = mx.array([float(self._forwards % 2**20), float(num_tokens)])
        mine = mx.concatenate([counts, (means * unit).reshape(-1)])
        return mx.distributed.all_gather(mine[None], group=self.group)

    def check(self, digests: mx.array, dtype: str) -> None:
        """Time an all-reduce again. Raises CanaryError if the evaluated digests of the ranks differ by more than
        rounding."""
        self.last_all_reduce_s = self._reduce_s(4, AGREE_REDUCES)
        lines = np.array(digests)
        apart = np.abs(lines - lines[0])
        worst = int(apart.max(axis=1).argmax())
        if (counts := apart[:, :2].max(axis=1)).any():
            astray = int(counts.argmax())
            own, leaders = (f"forward {int(lines[rank][0])} of {int(lines[rank][1])} tokens" for rank in (astray, 0))
            raise CanaryError(f"rank {astray} is out of step: it computed {own}, the leader {leaders}")
        if not apart.max() <= AGREE_WITHIN[dtype]:  # true for NaN, too
            raise CanaryError(
                f"rank {worst} has another result than the leader after {self._forwards} forwards: "
                f"{apart.max():.2g} apart, where {AGREE_WITHIN[dtype]} is allowed"
            )
