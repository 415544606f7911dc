"""Time limits for what a runner does."""

from __future__ import annotations

import msgspec


class RunnerLimits(msgspec.Struct, frozen=True):
    """Limits in seconds. None of them ends a runner that makes progress, however slow.

    first_message_s: from process start to its first report (imports of grpc and numpy on a slow board). silence_s:
    between any two reports afterwards; a heartbeat comes every 0.5 s. stopped_s: the same for a process that the system
    shows as stopped by a signal, which is not merely slow. load_base_s + the stage's bytes at load_bytes_per_s: the
    longest pause of a load before its own steps show how long a step takes; then load_step_s, or load_factor times the
    longest step so far. decode_s, prefill_s: shortest time after which a frame counts as stuck; else frame_factor times
    the time of similar frames. first_frame_s + a prefill at token_bytes_per_s: for a frame without earlier ones to
    compare with. stacks_every_s: how often a runner without progress is asked for its stacks; 0: only before it is
    ended. polite_s: from the request to stop to SIGTERM; terminate_s: from SIGTERM to SIGKILL, half of it if the runner
    was asked to stop before.
    """

    first_message_s: float = 20.0
    silence_s: float = 10.0
    stopped_s: float = 2.0
    load_base_s: float = 120.0
    load_bytes_per_s: float = 50e6
    load_step_s: float = 120.0
    load_factor: float = 10.0
    decode_s: float = 10.0
    prefill_s: float = 15.0
    frame_factor: float = 20.0
    first_frame_s: float = 120.0
    token_bytes_per_s: float = 20e9
    stacks_every_s: float = 0.0
    polite_s: float = 2.0
    terminate_s: float = 2.0

    def load_s(self, reserve_bytes: int) -> float:
        """Longest load of this size that reports no progress: a hard disk reads 50 MB/s."""
        return self.load_base_s + reserve_bytes / self.load_bytes_per_s

    def frame_s(self, tokens: int, *, is_prefill: bool, expected_s: float, stage_bytes: int) -> float:
        """How long the engine may compute one frame. expected_s: from the frames before it; 0 if unknown."""
        if expected_s > 0:
            return max(self.prefill_s if is_prefill else self.decode_s, self.frame_factor * expected_s)
        # as if each token read all weights; a board that computes 40 GFLOP/s in float32 is about as fast
        return self.first_frame_s + tokens * stage_bytes / self.token_bytes_per_s


DEFAULT_LIMITS = RunnerLimits()
