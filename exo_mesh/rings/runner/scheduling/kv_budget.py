"""Computes how many KV positions a stage can hold, from the memory that its engine really uses."""

from __future__ import annotations

import logging

from exo_mesh.domain.footprint import ENGINE_OVERHEAD_BYTES
from exo_mesh.domain.frame import Copy, Frame, Keep, Remove, Retain
from exo_mesh.engine.contract import SequenceCopier, StageEngine
from exo_mesh.engine.shared_positions import SharedPositions

LOOK_EVERY = 32
"""Frames between two measurements of the engine's memory: the engine visits all its tensors for each one."""

_log = logging.getLogger(__name__)


class KvBudget:
    """The KV budget of one stage, used in the engine's thread only.

    The plan reserved bytes for weights, the engine itself, and `planned` positions. Weights and KV may take more,
    because of buffers with room to grow or a dtype that the plan did not know. Then fewer new positions fit, each
    counted at the plan's price; the sequences that have the buffers may still fill them (`slack_tokens`). If the plan
    reserved nothing, the stage holds the planned number of positions.

    `tokens` counts every sequence at its full length: positions that sequences hold together count for each of them, so
    the stage holds as many more.
    """

    def __init__(
        self, engine: StageEngine, reserve_bytes: int, planned: int, most_kept_bytes: int | None = None
    ) -> None:
        """most_kept_bytes: limit of the prefix cache on this stage; None: what running sequences leave."""
        self._engine = engine
        self.shared = SharedPositions(engine.capabilities.shares_from)
        self._most_kept_bytes = most_kept_bytes
        self._kept: set[int] = set()
        self._weights_bytes = engine.memory_bytes()
        self._lengths: dict[int, int] = {}
        self._frames = 0
        self._free_bytes: int | None = None
        self.plan(reserve_bytes, planned)

    def plan(self, reserve_bytes: int, planned: int) -> None:
        """Use the figures of another plan: the engine stays, but its reserved bytes may differ. Positions that are
        shared now count for each sequence from now on, as at the driver: they show as free memory instead."""
        self.shared.clear()
        self._planned = planned
        self._kv_bytes = max(0, reserve_bytes - ENGINE_OVERHEAD_BYTES - self._weights_bytes)
        self._knows = reserve_bytes > 0
        self._price = self._kv_bytes / planned
        self.tokens = planned
        self.slack_tokens = 0
        self.most_kept_tokens = self._most_kept()
        if self._knows and not self._kv_bytes:
            _log.warning(
                "weights take %d bytes and leave nothing for KV of the %d bytes reserved: requests run one at a time",
                self._weights_bytes, reserve_bytes,
            )  # fmt: skip

    def _most_kept(self) -> int:
        """Positions that the prefix cache may keep here."""
        if not isinstance(self._engine, SequenceCopier):
            return 0
        if self._most_kept_bytes is None or (self._most_kept_bytes and not self._price):
            return self._planned  # a plan without figures: the pool is the only limit
        return min(self._planned, int(self._most_kept_bytes / (self._price or 1)))

    @property
    def shared_tokens(self) -> int:
        """Positions by which `tokens` is larger because sequences share them."""
        return self.shared.saved if self._knows else 0

    @property
    def num_kept(self) -> int:
        """Sequences that ended and are kept for new prompts. From any thread."""
        return len(self._kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept sequences, at the plan's price, as if they shared nothing; 0 if the plan reserved nothing.
        From any thread."""
        lengths = self._lengths
        return int(self._price * sum(lengths.get(one, 0) for one in list(self._kept)))

    def forget(self) -> None:
        """Note that the stage holds no sequence any more."""
        self._lengths = {}
        self._kept = set()
        self.shared.clear()

    def computed(self, frame: Frame, free_bytes: int | None = None) -> int:
        """Note a computed frame; returns how many positions the stage can hold, including the positions that it holds
        now.

        free_bytes: what the machine has free for KV now, whatever was reserved; None: enough.
        """
        for op in frame.ops:
            self.shared.note(op)
            if isinstance(op, Remove):
                self._lengths.pop(op.sequence, None)
                self._kept.discard(op.sequence)
            elif isinstance(op, Keep):
                if op.sequence in self._lengths:  # not one that was lost over a change of the plan
                    self._kept.add(op.sequence)
            elif isinstance(op, Copy):
                self._lengths[op.sequence] = op.upto
            elif isinstance(op, Retain):
                self._lengths = {one: held for one, held in self._lengths.items() if one in op.sequences}
                self._kept &= set(op.sequences)
        for row in frame.rows:
            self._lengths[row.sequence] = row.pos0 + row.n
        if self._knows and (frame.ops or self._frames % LOOK_EVERY == 0 or free_bytes != self._free_bytes):
            self._free_bytes = free_bytes
            self._look()
        self._frames += 1
        return self.tokens

    def _look(self) -> None:
        held = sum(self._lengths.values())
        if not self._kv_bytes:
            self.tokens = self.slack_tokens = 0
            return
        taken = self._engine.memory_bytes() - self._weights_bytes
        left = self._kv_bytes - taken
        if self._free_bytes is not None:
            left = min(left, self._free_bytes)
        self.tokens = max(0, int(held + left / self._price))
        filled = held - self.shared.saved
        self.slack_tokens = max(0, int(taken / self._price) - filled) if left >= 0 else 0
