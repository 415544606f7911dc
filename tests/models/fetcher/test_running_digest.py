"""A file is hashed while it arrives, and the digest is that of the whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from exo_mesh.models.fetcher.writing import ModelWriter, RunningDigest
from exo_mesh.weights.fetched import FetchedFile, Manifest, part_of, write_manifest

CONTENT = bytes(range(256)) * 50_000
NAME = "model.safetensors"


def nothing() -> None:
    """What a caller does between pieces."""


def test_a_digest_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file, read = tmp_path / "file", []
    file.write_bytes(CONTENT)
    digest = RunningDigest()
    for stop in (0, 1, 5_000_000, 5_000_000, len(CONTENT)):
        assert digest.extend(file, stop, lambda: read.append(1)) == hashlib.sha256(CONTENT[:stop]).hexdigest()
    assert len(read) == 5, "pieces of at most 4 MiB, and none read twice"
    with pytest.raises(OSError, match="shorter"):
        digest.extend(file, len(CONTENT) + 1, nothing)


@pytest.mark.parametrize("is_right", [True, False])
def test_what_was_hashed_ahead_counts_and_a_wrong_file_is_hashed_anew(tmp_path: Path, is_right: bool) -> None:
    right = hashlib.sha256(CONTENT).hexdigest()
    write_manifest(tmp_path, Manifest("m", files={NAME: FetchedFile(len(CONTENT), right)}))
    part_of(tmp_path, NAME).write_bytes(b"")
    first, second = memoryview(CONTENT)[:9_000_000], memoryview(CONTENT)[9_000_000:]
    writer, pieces = ModelWriter(tmp_path, 0), []
    try:
        writer.write(NAME, 9_000_000, second)
        writer.hash_ahead(NAME, lambda: pieces.append("gap"))
        assert not pieces, "the beginning is missing"
        writer.write(NAME, 0, first if is_right else memoryview(bytes(9_000_000)))
        writer.write(NAME, 9_000_000, second)
        assert writer.finish(NAME, lambda: pieces.append("end")) is is_right
        if not is_right:
            writer.write(NAME, 0, first)
            writer.hash_ahead(NAME, lambda: pieces.append("ahead"))
            writer.write(NAME, 9_000_000, second)
            assert "ahead" in pieces and writer.finish(NAME, nothing)
    finally:
        writer.close()
    assert (tmp_path / NAME).read_bytes() == CONTENT and not part_of(tmp_path, NAME).exists()
