"""The tokenizer of a model that only another peer has, on a node whose disk is full."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exo_mesh.errors import ModelError, UnknownModelError
from exo_mesh.machine.disk import Disk
from exo_mesh.models.calls import READ_TEXT_FILES
from exo_mesh.models.text_cache import TextCache
from exo_mesh.wire.proto import control_pb2 as pb


class Elsewhere:
    """A catalogue, a membership and its calls in one: a peer has the model, this node does not."""

    def __init__(self) -> None:
        self.fetches = 0
        self.calls = self
        self.id = "peer"

    async def card(self, name: str) -> Any:
        return SimpleNamespace(text_digest="digest")

    def local_dir(self, name: str) -> Path:
        raise UnknownModelError("not here")

    def holders(self, name: str) -> list[str]:
        return ["peer"]

    def peer(self, peer_id: str) -> Any:
        return self

    async def stream(self, peer_id: str, row: object, request: pb.ReadTextFilesRequest) -> AsyncIterator[pb.TextFile]:
        assert row is READ_TEXT_FILES
        self.fetches += 1
        yield pb.TextFile(name="tokenizer.json", chunk=b"{}")


def cache(tmp_path: Path, free_bytes: list[int]) -> tuple[TextCache, Elsewhere, Disk]:
    peer = Elsewhere()
    disk = Disk(tmp_path / "home", read=lambda path: (10**9, free_bytes[0]))
    made = TextCache(tmp_path / "home" / "text", peer, peer, disk, tmp_path / "spare")  # type: ignore[arg-type]
    return made, peer, disk


async def test_it_is_kept_in_the_home_if_there_is_room(tmp_path: Path) -> None:
    texts, peer, disk = cache(tmp_path, [10**9])
    first = await texts.directory("m")
    assert (first / "tokenizer.json").read_text() == "{}" and first.is_relative_to(tmp_path / "home")
    assert await texts.directory("m") == first and peer.fetches == 1 and disk.problem() is None


async def test_without_room_it_is_kept_elsewhere_and_that_is_said(tmp_path: Path) -> None:
    texts, peer, disk = cache(tmp_path, [10**6])
    first = await texts.directory("m")
    assert first.is_relative_to(tmp_path / "spare") and (first / "tokenizer.json").is_file()
    assert await texts.directory("m") == first and peer.fetches == 1
    problem = disk.problem()
    assert problem is not None and problem.code == "disk_full"
    texts.close()
    assert not (tmp_path / "spare").exists(), "nothing is left behind"


async def test_without_any_room_the_error_is_ours(tmp_path: Path) -> None:
    texts, _, _ = cache(tmp_path, [10**6])
    (tmp_path / "spare").write_text("a file, not a directory")
    with pytest.raises(ModelError, match=r"the tokenizer of .* cannot be stored"):
        await texts.directory("m")
