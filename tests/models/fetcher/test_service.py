"""The fetcher's answers where peers are among the sources; the hub's part is in test_hub.py."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from exo_mesh.domain.spans import Spans
from exo_mesh.errors import FetchError, UnknownModelError
from exo_mesh.models.fetcher.service import FetcherService
from exo_mesh.models.fetcher.skeleton import is_made
from exo_mesh.models.fetcher.source import ModelFiles, Sink
from exo_mesh.models.fetcher.wire import (
    Answer,
    Fetch,
    Fetched,
    FetchFailed,
    FetchProgress,
    Resolve,
    Resolved,
    Share,
    Source,
)
from exo_mesh.models.file_server.listing import FileInfo, Listing
from exo_mesh.weights.card import read_card
from exo_mesh.weights.fetched import is_here, read_manifest
from exo_mesh.weights.safetensors import on_disk
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.fetcher_child import is_same_model
from tests.support.partial import copy_partly

MODEL = TinyModel(layers=3, shards=2)


@dataclass
class DirectoryPeer:
    """A peer that has all files of a directory."""

    peer: str
    directory: Path | None
    digest: str = ""
    reads: list[str] = field(default_factory=list)

    def listing(self) -> Listing:
        if self.directory is None:
            raise UnknownModelError(f"{self.peer} has no such model")
        files = {file.name: FileInfo(file.stat().st_size) for file in self.directory.iterdir()}
        return Listing("", "", files, self.digest or read_card(self.directory, "m").digest)

    def read(self, file: str, start: int, stop: int, sink: Sink) -> None:
        self.reads.append(file)
        if self.directory is None:
            raise FetchError("gone")
        sink(memoryview((self.directory / file).read_bytes()[start:stop]))

    def close(self) -> None: ...


def first_file(original: Path) -> dict[str, Spans]:
    file = original / "model-00001-of-00002.safetensors"
    return {file.name: ((0, file.stat().st_size),)}


class Asked:
    """A service, and its answers in order."""

    def __init__(self, *peers: DirectoryPeer) -> None:
        self.peers = {peer.peer: peer for peer in peers}
        self.answers: queue.Queue[Answer] = queue.Queue()
        self.service = FetcherService(self.answers.put, self._open)

    def _open(self, source: Source, name: str, tls: object) -> ModelFiles:
        return self.peers[source.peer]

    def ask(self, request: Resolve | Fetch) -> Answer:
        self.service.handle(request)
        while isinstance(answer := self.answers.get(timeout=20), FetchProgress):
            pass
        return answer

    def sources(self, *names: str) -> tuple[Source, ...]:
        return tuple(Source(name) for name in names)

    def resolve(self, model_dir: Path, *names: str) -> Answer:
        return self.ask(Resolve(1, "m", "", "", str(model_dir), self.sources(*names)))

    def fetch(self, model_dir: Path, *names: str) -> Answer:
        manifest = read_manifest(model_dir)
        assert manifest is not None
        pieces = {name: ((0, file.size),) for name, file in manifest.files.items()}
        return self.fetch_only(model_dir, pieces, *names)

    def fetch_only(self, model_dir: Path, pieces: Mapping[str, Spans], *names: str) -> Answer:
        return self.ask(Fetch(2, str(model_dir), (Share(dict(pieces), self.sources(*names)),)))


class PartPeer(DirectoryPeer):
    """A peer that has what was fetched of a model."""

    def listing(self) -> Listing:
        assert self.directory is not None
        names = {file.name.removesuffix(".part"): file for file in self.directory.iterdir()}
        files = {name: FileInfo(file.stat().st_size) for name, file in names.items()}
        return Listing("", "", files, read_card(self.directory, "m").digest)

    def read(self, file: str, start: int, stop: int, sink: Sink) -> None:
        assert self.directory is not None
        manifest = read_manifest(self.directory)
        if not is_here(manifest, {file: ((start, stop),)} if file.endswith(".safetensors") else {}):
            raise FetchError(f"{self.peer} lacks bytes of {file}")
        sink(memoryview(on_disk(self.directory / file).read_bytes()[start:stop]))


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "original", MODEL)


def test_a_model_of_no_hub_comes_from_the_peers_that_have_it(tmp_path: Path, original: Path) -> None:
    asked = Asked(DirectoryPeer("a", None), DirectoryPeer("b", original))
    assert isinstance(asked.resolve(tmp_path / "m", "a", "b"), Resolved)
    answer = asked.fetch(tmp_path / "m", "a", "b")
    assert isinstance(answer, Fetched) and set(answer.num_bytes) == {"b"}
    assert is_same_model(tmp_path / "m", original)
    failed = asked.resolve(tmp_path / "other", "a")
    assert isinstance(failed, FetchFailed) and failed.code == "model_not_found"
    assert "a has no such model" in failed.message


def test_a_peer_with_another_version_of_the_model_is_not_read_from(tmp_path: Path, original: Path) -> None:
    other = write_checkpoint(tmp_path / "tuned", TinyModel(layers=3, shards=2, seed=5))
    liar = DirectoryPeer("liar", other)
    asked = Asked(liar, DirectoryPeer("b", original))
    assert isinstance(asked.resolve(tmp_path / "m", "b"), Resolved)
    assert isinstance(asked.fetch(tmp_path / "m", "liar", "b"), Fetched)
    assert not liar.reads and is_same_model(tmp_path / "m", original)


def test_a_skeleton_is_copied_from_a_peer_that_has_no_more(tmp_path: Path, original: Path) -> None:
    skeleton = copy_partly(original, tmp_path / "skeleton", {})
    asked = Asked(
        PartPeer("a", skeleton), PartPeer("b", copy_partly(original, tmp_path / "half", first_file(original)))
    )
    assert isinstance(asked.resolve(tmp_path / "m", "a"), Resolved)
    assert read_card(tmp_path / "m", "m") == read_card(original, "m")
    failed = asked.fetch(tmp_path / "m", "a", "b")
    assert isinstance(failed, FetchFailed) and "b lacks bytes of model-00002" in failed.message
    assert isinstance(asked.fetch_only(tmp_path / "m", first_file(original), "a", "b"), Fetched)
    assert (tmp_path / "m" / "model-00001-of-00002.safetensors").exists(), "b has it, and a is no obstacle"


def test_a_skeleton_that_is_not_what_its_source_said_is_refused(tmp_path: Path, original: Path) -> None:
    failed = Asked(DirectoryPeer("a", original, "0" * 64)).resolve(tmp_path / "m", "a")
    assert isinstance(failed, FetchFailed) and "do not have the digest that their source gave" in failed.message
    assert not (tmp_path / "m").exists()


def test_a_hub_is_not_asked_for_a_model_of_the_mesh_alone(tmp_path: Path, original: Path) -> None:
    asked = Asked(DirectoryPeer("a", original))
    assert isinstance(asked.resolve(tmp_path / "m", "a"), Resolved)
    failed = asked.fetch(tmp_path / "m", "")
    assert isinstance(failed, FetchFailed) and "m is not on the hub" in failed.message


@pytest.mark.parametrize("place", ["taken", "taken/name"])
def test_a_file_in_the_place_of_a_model_is_named_as_the_reason(tmp_path: Path, place: str) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(FetchError, match="a file has the place of") as caught:
        is_made(tmp_path / place)
    assert caught.value.is_final and caught.value.remedy == "move the file away"
