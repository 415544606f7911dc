"""A hub, a peer or a model directory that lies: nothing is written elsewhere, and the token stays where it belongs.

`python -m tools.fuzz files` has many more lies.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import httpx2
import pytest

from exo_mesh.errors import FetchError
from exo_mesh.models.fetcher.download import Context, Download
from exo_mesh.models.fetcher.duty import DutyCycle
from exo_mesh.models.fetcher.hub_client import FILE, MAX_ANSWER_BYTES, bounded
from exo_mesh.models.fetcher.listings import MAX_FILE_BYTES, MAX_FILES, checked
from exo_mesh.models.fetcher.writing import LOCK_FILE, ModelWriter
from exo_mesh.models.file_server.listing import FileInfo, Listing
from exo_mesh.weights.fetched import MANIFEST_FILE, FetchedFile, Manifest, part_of, write_manifest
from tests.models.fetcher.conftest import REPO
from tests.support.fetcher_child import FetcherChild, FetchFailed, fetcher_environ
from tests.support.hub import LoopbackHub, Refusal

COMMIT = "c" * 40
WEIGHTS = "model.safetensors"


def listing(*names: str, size: int = 5, repo: str = "org/m", revision: str = COMMIT) -> Listing:
    return Listing(repo, revision, {name: FileInfo(size, "x") for name in names})


def test_names_that_lead_elsewhere_are_dropped() -> None:
    evil = ("../up.json", "/etc/passwd", "a/../../b.json", "a\0.json", "x" * 600, ".hidden", "a\n.json", "\x1b[1m", "")
    found = checked(listing("config.json", "Q4_K_M/m-00001-of-00002.gguf", *evil))
    assert list(found.files) == ["config.json", "Q4_K_M/m-00001-of-00002.gguf"]
    assert found.files["config.json"].sha256 == "", "what is no digest is none"


@pytest.mark.parametrize("size", [-1, MAX_FILE_BYTES + 1, 2**62, "9", None, 1.5])
def test_sizes_that_cannot_be_are_refused(size: int) -> None:
    with pytest.raises(FetchError, match=r"gave model\.safetensors an impossible size"):
        checked(listing(WEIGHTS, size=size))


def test_listings_without_end_and_false_origins_are_refused() -> None:
    with pytest.raises(FetchError, match="lists 100001 files"):
        checked(listing(*(f"f{number}.json" for number in range(MAX_FILES + 1))))
    for repo, revision in (("../..", COMMIT), ("org/m", "../../etc"), ("org/m", "\0"), ("a/b/c", COMMIT), ("", "x")):
        with pytest.raises(FetchError, match="invalid repository or commit"):
            checked(listing("config.json", repo=repo, revision=revision))
    assert checked(listing("config.json", repo="", revision="")).files


@pytest.mark.parametrize("name", [f"{WEIGHTS}.part", LOCK_FILE, f"{MANIFEST_FILE}.new"])
def test_nothing_is_written_through_a_link_in_a_model_directory(tmp_path: Path, name: str) -> None:
    model_dir, outside = tmp_path / "m", tmp_path / "outside"
    model_dir.mkdir()
    outside.write_bytes(b"mine")
    write_manifest(model_dir, Manifest("m", files={WEIGHTS: FetchedFile(100)}))
    (model_dir / name).symlink_to(outside)
    try:
        writer = ModelWriter(model_dir, 0)
        writer.write(WEIGHTS, 0, memoryview(b"y" * 100))
        writer.close()
    except FetchError:
        pass
    assert outside.read_bytes() == b"mine"
    assert not part_of(model_dir, WEIGHTS).is_symlink() or name == LOCK_FILE


def test_a_file_that_is_larger_than_the_disk_is_refused_before_a_list_of_its_chunks_is_made(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest("m", files={WEIGHTS: FetchedFile(2**42)}))
    writer = ModelWriter(tmp_path, 2**60)
    with ThreadPoolExecutor(1) as executor, pytest.raises(FetchError, match="there is no room on the disk"):
        Download(writer, [({WEIGHTS: ((0, 2**62),)}, ())], Context(executor, DutyCycle())).run()
    writer.close()


@pytest.mark.slow
def test_a_redirect_does_not_take_the_token_elsewhere(tmp_path: Path, hub: LoopbackHub) -> None:
    hub.seen_tokens.clear()
    elsewhere = {"Location": f"{hub.storage_url}/blob/{quote(REPO, safe='')}/config.json"}
    with FetcherChild(fetcher_environ(hub, tmp_path / "hf", HF_TOKEN="hf_mine")) as fetcher:
        for path in ("/api/", "/resolve/"):
            for location in (elsewhere, {"Location": "file:///etc/passwd"}):
                hub.faults.refusals = [Refusal(302, 20, location, path)]
                assert isinstance(fetcher.resolve(REPO, tmp_path / "models" / "m"), FetchFailed)
    assert hub.requests["GET blob"] > 0 and hub.seen_tokens == {"hf_mine"} and not hub.blob_tokens
    assert not list((tmp_path / "models").glob("*"))


def test_answers_of_a_hub_are_bounded() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        pieces = (b" " * 2**20 for _ in range(MAX_ANSWER_BYTES // 2**20 + 1))
        return httpx2.Response(200, content=pieces, headers={"Content-Encoding": request.url.path[1:]})

    with bounded(httpx2.Client(transport=httpx2.MockTransport(answer))) as client:
        with pytest.raises(FetchError, match="has more than 16777216 bytes"):
            client.get("http://hub/identity")
        with pytest.raises(FetchError, match="compressed answer"):
            client.get("http://hub/gzip")
        with client.stream("GET", "http://hub/identity", extensions={FILE: True}) as response:
            assert sum(len(piece) for piece in response.iter_raw()) > MAX_ANSWER_BYTES, "read piece by piece"
