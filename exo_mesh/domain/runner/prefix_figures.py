"""The figures of a stage's prefix cache in its heartbeats. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec

from exo_mesh.domain.fields import SentAs


class PrefixFigures(msgspec.Struct):
    """What a stage keeps, and, of a driver, how often prompts used it since the start; see runner.proto. The parts of a
    runner fill it one after another."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    kept_tokens: int = 0
    kept: int = 0
    num_bytes: Annotated[int, SentAs("bytes")] = 0
    is_on: bool = False
    disk_is_on: bool = False
    disk_hits: int = 0
    disk_hit_tokens: int = 0
    disk_misses: int = 0
    disk_known: int = 0
    disk_files: int = 0
    disk_bytes: int = 0
    disk_writes: int = 0
    disk_errors: int = 0
    disk_problem: str = ""
    has_disk: bool = False
    digest: bytes = b""
