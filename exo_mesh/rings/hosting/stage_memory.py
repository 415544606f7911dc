"""The memory that stages of this node hold, and what a further one could get."""

from __future__ import annotations

from exo_mesh.machine.memory import MemoryReader, capacity_bytes, usable_bytes
from exo_mesh.rings.hosting.reservations import Reservations


class StageMemory:
    """The reservations of stages, and the figures of this machine. most_bytes: the limit of the settings.
    why_no_layers: set if this node never holds layers."""

    def __init__(self, read: MemoryReader, most_bytes: int | None = None, why_no_layers: str = "") -> None:
        self.held = Reservations()
        self.why_no_layers = why_no_layers
        self._read = read
        self._most_bytes = most_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.held.reserved_bytes

    def usable_bytes(self) -> int:
        """Bytes that a new reservation could get now."""
        if self.why_no_layers:
            return 0
        return usable_bytes(self._read(), self._most_bytes, self.held.reserved_bytes, self.held.pending_bytes)

    def capacity_bytes(self) -> int:
        """Bytes that models could take if nothing else ran here."""
        return 0 if self.why_no_layers else capacity_bytes(self._read(), self._most_bytes)
