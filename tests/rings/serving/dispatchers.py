"""A ring of two real nodes and their runners, whose machines have the memory that a test says they have."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.support.peers import Peer

MODEL, SMALL = "long", "small"
"""Two models on the disks of both; the first one is placed."""
ROOM = "16GiB 14GiB"


@dataclass(frozen=True)
class Ring:
    """Two peers, the file with the memory of each, and where the models are."""

    peers: list[Peer]
    files: list[Path]
    folder: Path

    def say(self, index: int, memory: str) -> None:
        """At once: a reader sees the old line or the new one."""
        fresh = self.files[index].with_suffix(".new")
        fresh.write_text(memory)
        os.replace(fresh, self.files[index])
