"""Config, tokenizer and index are compared with the hub's ids of them, from whatever source they come."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from exo_mesh.models.fetcher.wire import FetchFailed, Resolved
from exo_mesh.models.file_server.listing import FileInfo, Listing, git_id_of
from exo_mesh.models.file_server.offered import OfferedModel
from exo_mesh.weights.card import read_card
from exo_mesh.weights.fetched import FetchedFile, Manifest, read_manifest, write_manifest
from tests.models.fetcher.conftest import REPO
from tests.models.fetcher.test_service import Asked, DirectoryPeer
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.fetcher_child import FetcherChild, fetcher_environ
from tests.support.hub import LoopbackHub

TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json")


def spoil(file: Path) -> None:
    """Change one byte in the middle; the size stays."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x01
    file.unlink()
    file.write_bytes(content)


class Offering(DirectoryPeer):
    """A peer that has a whole model of a hub, and says so as its file server does."""

    def listing(self) -> Listing:
        assert self.directory is not None
        return OfferedModel(self.directory, self.digest, read_manifest(self.directory)).listing()


def offering(peer: str, original: Path, model_dir: Path) -> Offering:
    shutil.copytree(original, model_dir)
    weights = {file.name: FetchedFile(file.stat().st_size) for file in original.glob("*.safetensors")}
    for one in weights.values():
        one.present = [(0, one.size)]
    ids = {name: git_id_of((original / name).read_bytes()) for name in TEXTS if (original / name).exists()}
    write_manifest(model_dir, Manifest("m", "org/m", "c" * 40, weights, git_ids=ids))
    return Offering(peer, model_dir, read_card(original, "m").digest)


def test_an_id_of_a_text_is_the_id_that_git_gives_to_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"a": 1}\n')
    assert git_id_of(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    if shutil.which("git"):
        said = subprocess.run(["git", "hash-object", tmp_path / "a.json"], capture_output=True, text=True, check=True)
        assert said.stdout.strip() == git_id_of(b'{"a": 1}\n')


def test_content_is_compared_with_each_digest_that_is_known() -> None:
    sha256 = hashlib.sha256(b"right").hexdigest()
    for info in (FileInfo(5, sha256), FileInfo(5, "", git_id_of(b"right")), FileInfo(5, sha256, git_id_of(b"right"))):
        assert info.has_content(b"right") and not info.has_content(b"wrong")
    assert FileInfo(5).has_content(b"wrong"), "nothing is known of it"


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_with_a_wrong_byte_is_fetched_once_more_and_then_refused(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path, name: str
) -> None:
    if not (original / name).exists():
        pytest.skip(f"the model has no {name}")
    hub.faults.corrupt = {name: 2}
    answer = child.resolve(REPO, tmp_path / "m")
    assert isinstance(answer, FetchFailed) and f"{name} of {REPO} has wrong bytes at the hub" in answer.message
    assert not (tmp_path / "m").exists()
    hub.faults.corrupt = {name: 1}
    assert isinstance(child.resolve(REPO, tmp_path / "m"), Resolved)
    assert (tmp_path / "m" / name).read_bytes() == (original / name).read_bytes()


@pytest.mark.extended
def test_a_cache_with_a_wrong_text_is_not_believed(tmp_path: Path, hub: LoopbackHub, original: Path) -> None:
    cached = tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / hub.repos[REPO].commit
    shutil.copytree(original, cached)
    spoil(cached / "config.json")
    with FetcherChild(fetcher_environ(hub, tmp_path / "hf")) as fetcher:
        assert isinstance(fetcher.resolve(REPO, tmp_path / "m"), Resolved)
    assert (tmp_path / "m" / "config.json").read_bytes() == (original / "config.json").read_bytes()


@pytest.mark.parametrize("name", TEXTS)
def test_a_wrong_text_of_a_peer_is_taken_from_another_one(tmp_path: Path, name: str) -> None:
    original = write_checkpoint(tmp_path / "original", TinyModel(layers=2, shards=2))
    if not (original / name).exists():
        pytest.skip(f"the model has no {name}")
    bad, good = (offering(peer, original, tmp_path / peer) for peer in ("bad", "good"))
    spoil(tmp_path / "bad" / name)
    asked = Asked(bad, good)
    alone = asked.resolve(tmp_path / "m", "bad")
    assert isinstance(alone, FetchFailed) and f"{name} of m has wrong bytes at peer bad" in alone.message
    assert isinstance(asked.resolve(tmp_path / "m", "bad", "good"), Resolved)
    assert (tmp_path / "m" / name).read_bytes() == (original / name).read_bytes()
    manifest = read_manifest(tmp_path / "m")
    assert manifest is not None and name in manifest.git_ids, "the next peer can check it too"
