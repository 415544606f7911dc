"""What a node says of the memory that an engine's library takes."""

from __future__ import annotations

from msgspec.structs import asdict

from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.engine.contract import LibraryMemory
from exo_mesh.node.inspection.describe import describe_stage_memory
from exo_mesh.rings.hosting.status_board import StageBeat


def library_of(memory: LibraryMemory | None) -> object:
    return describe_stage_memory(StageBeat("m-1", 0, False, Heartbeat(library=memory)))["library"]


def test_a_library_that_counts_is_shown_and_one_that_does_not_is_null() -> None:
    assert library_of(None) is None
    for memory in (LibraryMemory("mlx", 10, 2, 14, 99), LibraryMemory("torch", 10, 2, 14)):
        assert library_of(memory) == asdict(memory)
