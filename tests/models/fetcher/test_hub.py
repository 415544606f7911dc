"""A fetcher against a hub that misbehaves: the right bytes or one clear error, and nothing half-made is ever usable."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain.spans import num_bytes
from exo_mesh.models.fetcher.choosing import MAX_TEXT_FILES, text_files
from exo_mesh.models.fetcher.wire import Answer, CancelFetch, FetchPace, SearchResult
from exo_mesh.models.file_server.listing import FileInfo
from exo_mesh.models.file_server.offered import OfferedModel
from exo_mesh.text.embedding import read_embedding_settings
from exo_mesh.text.template import find_template
from exo_mesh.weights.card import digest_samples, read_card
from exo_mesh.weights.fetched import is_here, part_of, read_manifest
from exo_mesh.weights.safetensors import read_tensor_table
from tests.models.fetcher.conftest import MODEL, REPO
from tests.support.checkpoints import TinyModel, write_checkpoint, write_json
from tests.support.fetcher_child import (
    Fetched,
    FetcherChild,
    FetchFailed,
    fetcher_environ,
    is_same_model,
    wrong_files,
)
from tests.support.hub import LoopbackHub, Refusal
from tests.support.partial import layer_pieces


def failed(answer: Answer) -> FetchFailed:
    assert isinstance(answer, FetchFailed), answer
    return answer


def weights_bytes(original: Path) -> int:
    return sum(file.stat().st_size for file in original.glob("*.safetensors"))


def variant(original: Path, target: Path, *, without: str = "", **config: object) -> Path:
    """A repository with other settings in config.json, or without the files that match."""
    shutil.copytree(original, target)
    write_json(target / "config.json", json.loads((target / "config.json").read_text()) | config)
    for file in target.glob(without) if without else ():
        file.unlink()
    return target


def test_a_skeleton_has_the_card_of_the_whole_model_and_no_weights(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    model_dir = tmp_path / "org" / "tiny"
    answer = child.resolve(REPO, model_dir)
    assert not isinstance(answer, FetchFailed), answer
    assert read_card(model_dir, REPO) == read_card(original, REPO)
    assert hub.sent_of(".safetensors") < 0.1 * weights_bytes(original)
    assert not list(model_dir.glob("*.safetensors")) and len(list(model_dir.glob("*.part"))) == 3
    assert [file.name for file in model_dir.parent.iterdir()] == ["tiny"]
    manifest = read_manifest(model_dir)
    assert manifest is not None and manifest.repo == REPO and manifest.revision == hub.repos[REPO].commit
    assert not manifest.is_whole


def test_samples_that_are_near_each_other_are_read_by_one_request(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild
) -> None:
    model_dir = write_checkpoint(tmp_path / "original", TinyModel("qwen3", 6, 256, 16, 1, 1024))
    (samples,) = digest_samples(read_tensor_table(model_dir)).values()
    hub.add("org/near", model_dir)
    assert not isinstance(child.resolve("org/near", tmp_path / "m"), FetchFailed)
    assert len(samples) > 30 and hub.requests["GET blob"] <= 0.75 * len(samples)
    assert hub.sent_of(".safetensors") < 0.02 * (model_dir / "model.safetensors").stat().st_size


def test_a_model_is_fetched_once_and_checked(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    model_dir = tmp_path / "m"
    answer = child.pull(REPO, model_dir)
    assert isinstance(answer, Fetched) and is_same_model(model_dir, original)
    manifest = read_manifest(model_dir)
    assert manifest is not None and all(file.is_checked for file in manifest.files.values())
    assert hub.sent_of(".safetensors") <= 1.02 * weights_bytes(original)
    assert answer.num_bytes[""] == pytest.approx(weights_bytes(original), rel=0.1)
    assert isinstance(child.pull(REPO, model_dir), Fetched), "again, with nothing left to do"
    assert hub.sent_of(".safetensors") <= 1.02 * weights_bytes(original)


def test_a_stage_fetches_the_bytes_of_its_layers_only(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    model_dir = tmp_path / "m"
    child.resolve(REPO, model_dir)
    pieces = layer_pieces(original, 1, 3, MODEL.layers)
    assert isinstance(child.fetch(model_dir, pieces), Fetched)
    assert is_here(read_manifest(model_dir), pieces)
    assert hub.sent_of(".safetensors") <= 1.1 * sum(map(num_bytes, pieces.values()))
    for name, spans in pieces.items():
        file = model_dir / name
        content, right = (file if file.exists() else part_of(model_dir, name)).read_bytes(), original / name
        assert all(content[start:stop] == right.read_bytes()[start:stop] for start, stop in spans)
    assert not wrong_files(model_dir, original)


@pytest.fixture
def xet_repo(hub: LoopbackHub, original: Path) -> str:
    """A repository whose weights lie on Xet."""
    hub.add("org/on-xet", original, is_xet=True)
    hub.blob_tokens.clear()
    return "org/on-xet"


def test_a_model_on_xet_is_fetched_whole_and_checked(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path, xet_repo: str
) -> None:
    assert isinstance(child.pull(xet_repo, tmp_path / "m"), Fetched) and is_same_model(tmp_path / "m", original)
    manifest = read_manifest(tmp_path / "m")
    assert manifest is not None and all(file.is_checked for file in manifest.files.values())
    assert hub.requests["GET xet-bridge"] and not hub.requests["GET blob"]
    assert not hub.blob_tokens, "the bridge refuses a token beside its signature"


def test_a_stage_fetches_its_layers_from_xet_by_ranges(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path, xet_repo: str
) -> None:
    model_dir = tmp_path / "m"
    child.resolve(xet_repo, model_dir)
    pieces = layer_pieces(original, 1, 3, MODEL.layers)
    assert isinstance(child.fetch(model_dir, pieces), Fetched)
    assert hub.sent_of(".safetensors") <= 1.1 * sum(map(num_bytes, pieces.values()))
    assert not wrong_files(model_dir, original)


def test_an_address_of_xet_that_expires_is_asked_for_again(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path, xet_repo: str
) -> None:
    hub.faults.good_for = 5
    assert isinstance(child.pull(xet_repo, tmp_path / "m"), Fetched) and is_same_model(tmp_path / "m", original)
    assert hub.requests["HEAD resolve"] > len(list(original.iterdir())), "some were asked for a second time"


@pytest.mark.extended
def test_a_connection_that_is_cut_all_the_time_only_takes_longer(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    hub.faults.cut_bytes = 200_000
    assert isinstance(child.pull(REPO, tmp_path / "m"), Fetched)
    assert is_same_model(tmp_path / "m", original)
    assert hub.sent_of(".safetensors") <= 1.1 * weights_bytes(original), "each piece goes on where it stopped"


@pytest.mark.extended
def test_a_hub_without_ranges_sends_whole_files(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    hub.faults.has_ranges = False
    assert isinstance(child.pull(REPO, tmp_path / "m"), Fetched)
    assert is_same_model(tmp_path / "m", original)


@pytest.mark.extended
def test_a_corrupted_file_is_fetched_once_more(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    child.resolve(REPO, tmp_path / "m")
    hub.faults.corrupt = {"model-00002-of-00003.safetensors": 1}
    assert isinstance(child.fetch(tmp_path / "m"), Fetched)
    assert is_same_model(tmp_path / "m", original)


@pytest.mark.extended
def test_a_file_that_stays_corrupted_is_an_error_and_gets_no_name(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    model_dir = tmp_path / "m"
    child.resolve(REPO, model_dir)
    hub.faults.corrupt = {"model-00002-of-00003.safetensors": 2}
    answer = failed(child.fetch(model_dir))
    assert "model-00002-of-00003.safetensors does not match its sha256" in answer.message and answer.is_final
    assert not (model_dir / "model-00002-of-00003.safetensors").exists() and not wrong_files(model_dir, original)
    assert isinstance(child.fetch(model_dir), Fetched), "once the hub is well"
    assert is_same_model(model_dir, original)


@pytest.mark.extended
def test_a_busy_hub_is_asked_again(tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path) -> None:
    soon = {"Retry-After": "0"}
    hub.faults.refusals = [Refusal(status, 1, soon, path) for status in (429, 503)
                           for path in ("/api/", "/resolve/", "/blob/")]  # fmt: skip
    assert isinstance(child.pull(REPO, tmp_path / "m"), Fetched)
    assert is_same_model(tmp_path / "m", original)


@pytest.mark.extended
def test_an_address_that_has_expired_is_asked_for_again(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    child.resolve(REPO, tmp_path / "m")
    hub.faults.refusals = [Refusal(403, 2, {}, "/blob/")]
    answer = child.fetch(tmp_path / "m")
    assert isinstance(answer, Fetched), answer
    assert is_same_model(tmp_path / "m", original)


@pytest.mark.extended
def test_retry_after_is_waited_for(tmp_path: Path, hub: LoopbackHub, child: FetcherChild) -> None:
    hub.faults.refusals = [Refusal(429, 1, {"Retry-After": "1"}, "/api/")]
    began = time.monotonic()
    assert not isinstance(child.resolve(REPO, tmp_path / "m"), FetchFailed)
    assert time.monotonic() - began >= 1
    hub.faults.refusals = [Refusal(429, 1, {"Retry-After": "4000"}, "/api/")]
    answer = failed(child.resolve(REPO, tmp_path / "other"))
    assert "limits the rate of requests (429)" in answer.message and not answer.is_final


def test_what_is_not_there_is_said(tmp_path: Path, hub: LoopbackHub, child: FetcherChild) -> None:
    missing = failed(child.resolve("org/none", tmp_path / "m"))
    assert missing.code == "model_not_found" and 'no model "org/none"' in missing.message
    revision = failed(child.resolve(REPO, tmp_path / "m", revision="v9"))
    assert revision.code == "model_not_found" and f'{REPO} has no revision "v9"' in revision.message
    assert failed(child.resolve("a/b/../c", tmp_path / "m")).code == "model_not_found"
    assert not list(tmp_path.iterdir())


def test_a_gated_repository_says_which_token_is_missing(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    hub.add("org/gated", original, gated="manual")
    answer = failed(child.resolve("org/gated", tmp_path / "m"))
    assert answer.message.startswith("org/gated is gated") and answer.is_final
    assert f"{hub.url}/org/gated" in answer.remedy and "HF_TOKEN" in answer.remedy
    assert not list(tmp_path.iterdir())


@pytest.mark.extended
def test_the_token_goes_to_the_hub_alone_and_into_no_message(tmp_path: Path, hub: LoopbackHub, original: Path) -> None:
    hub.seen_tokens.clear()
    hub.add("org/gated", original, gated="auto", tokens=frozenset({"hf_right"}))
    environ = fetcher_environ(hub, tmp_path / "hf", HF_TOKEN="hf_wrong", NO_PROXY="127.0.0.1")
    with FetcherChild(environ) as wrong:
        answer = failed(wrong.resolve("org/gated", tmp_path / "m"))
    assert "the token in HF_TOKEN gives no access to it" in answer.message
    assert "hf_wrong" not in f"{answer.message} {answer.remedy}"
    with FetcherChild(environ | {"HF_TOKEN": "hf_right"}) as right:
        assert isinstance(right.pull("org/gated", tmp_path / "m"), Fetched)
    assert is_same_model(tmp_path / "m", original)
    assert hub.seen_tokens == {"hf_wrong", "hf_right"} and not hub.blob_tokens


@pytest.mark.parametrize(
    ("without", "config", "more", "says", "remedy"),
    [
        ("*.safetensors*", {}, "pytorch_model.bin", r"only as pickle \(pytorch_model\.bin\)", "safetensors"),
        ("*.safetensors*", {}, "tiny.Q2_K.gguf", r"as GGUF only \(tiny\.Q2_K\.gguf\)", "org/other:Q2_K"),
        ("*.safetensors*", {}, "consolidated.safetensors", r"\(consolidated\.safetensors\) are not in", "layout"),
        ("tokenizer.json", {}, "", r"has no tokenizer\.json", "save_pretrained"),
        ("config.json", {}, "", r"has no config\.json", "config.json"),
        ("", {"quantization_config": {"quant_method": "eetq"}}, "", 'quantisation "eetq" is not supported', ""),
        ("", {"model_file": "mine.py"}, "", r'asks to run code of its own \("mine\.py"\)', "support themselves"),
        ("model-00003*", {}, "", r"has no model-00003-of-00003\.safetensors", ""),
    ],
    ids=["pickle", "gguf", "other-names", "no-tokenizer", "no-config", "quantisation", "code", "missing-shard"],
)
def test_what_cannot_run_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path, *, without: str,
    config: dict[str, object], more: str, says: str, remedy: str
) -> None:  # fmt: skip
    directory = variant(original, tmp_path / "hub", without=without, **config)
    if more:
        (directory / more).write_bytes(b"x" * 1000)
    hub.add("org/other", directory)
    answer = failed(child.resolve("org/other", tmp_path / "models" / "m"))
    assert re.search(says, answer.message), answer
    assert answer.is_final and remedy in answer.remedy and "org/other" in answer.message
    assert not any(hub.sent_of(suffix) for suffix in (".safetensors", ".bin", ".gguf"))
    assert not list((tmp_path / "models").glob("*"))


@pytest.mark.extended
def test_a_header_that_lies_is_an_error_and_leaves_nothing(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    directory = variant(original, tmp_path / "hub")
    (directory / "model-00001-of-00003.safetensors").write_bytes(b"\xff" * 5000)
    hub.add("org/lies", directory)
    answer = failed(child.resolve("org/lies", tmp_path / "models" / "m"))
    assert answer.code == "model_unusable" and "is not a safetensors file" in answer.message
    assert not list((tmp_path / "models").glob("*"))


@pytest.mark.extended
def test_code_of_a_model_is_fetched_only_when_it_is_trusted(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    directory = variant(original, tmp_path / "hub", auto_map={"AutoConfig": "mine.Config"})
    (directory / "mine.py").write_text("raise SystemExit")
    hub.add("org/code", directory)
    child.resolve("org/code", tmp_path / "plain")
    child.resolve("org/code", tmp_path / "trusted", trust_remote_code=True)
    assert not (tmp_path / "plain" / "mine.py").exists() and (tmp_path / "trusted" / "mine.py").exists()


@pytest.mark.extended
def test_what_the_cache_has_is_not_downloaded(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    cached = tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / hub.repos[REPO].commit
    shutil.copytree(original, cached)
    with FetcherChild(fetcher_environ(hub, tmp_path / "hf")) as fetcher:
        answer = fetcher.pull(REPO, tmp_path / "m")
    assert isinstance(answer, Fetched) and is_same_model(tmp_path / "m", original)
    assert hub.sent_bytes == 0 and answer.num_bytes == {}


@pytest.mark.timeout(20)
def test_a_cancelled_fetch_ends_although_the_hub_has_fallen_silent(
    tmp_path: Path, hub: LoopbackHub, original: Path
) -> None:
    environ = fetcher_environ(hub, tmp_path / "hf", HF_HUB_DOWNLOAD_TIMEOUT="3600")
    with FetcherChild(environ) as fetcher:
        fetcher.resolve(REPO, tmp_path / "m")
        hub.faults.hold.set()
        begun = hub.requests["GET blob"]
        number = fetcher.begin_fetch(tmp_path / "m")
        while hub.requests["GET blob"] == begun:
            time.sleep(0.01)
        fetcher.send(CancelFetch(number))
        assert failed(fetcher.answer()).code == "cancelled"
        hub.faults.hold.clear()
        assert isinstance(fetcher.fetch(tmp_path / "m"), Fetched) and is_same_model(tmp_path / "m", original)


@pytest.mark.extended
def test_a_cancelled_fetch_keeps_what_came(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    model_dir = tmp_path / "m"
    child.resolve(REPO, model_dir)
    before = read_manifest(model_dir)
    hub.faults.pause_s = 0.02
    number = child.begin_fetch(model_dir)
    sent = hub.sent_of(".safetensors")
    while hub.sent_of(".safetensors") < sent + 1_500_000:
        time.sleep(0.01)
    child.send(CancelFetch(number))
    assert failed(child.answer()).code == "cancelled"
    after = read_manifest(model_dir)
    assert before is not None and after is not None and after.present_bytes > before.present_bytes
    assert not wrong_files(model_dir, original)
    hub.faults.pause_s = 0
    assert isinstance(child.fetch(model_dir), Fetched) and is_same_model(model_dir, original)


@pytest.mark.extended
def test_a_full_disk_is_seen_before_anything_is_fetched(tmp_path: Path, hub: LoopbackHub) -> None:
    with FetcherChild(fetcher_environ(hub, tmp_path / "hf"), floor_bytes=2**60) as fetcher:
        answer = failed(fetcher.resolve(REPO, tmp_path / "models" / "m"))
    assert "there is no room on the disk" in answer.message and "must stay free" in answer.message
    assert "free disk space" in answer.remedy and answer.is_final
    assert hub.sent_of(".safetensors") == 0


def test_one_quantisation_of_a_gguf_repository_is_fetched(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild
) -> None:
    directory = tmp_path / "hub"
    (directory / "Q4_K_M").mkdir(parents=True)
    shards = [f"tiny-Q4_K_M-{shard:05}-of-00002.gguf" for shard in (1, 2)]
    for place in (*(f"Q4_K_M/{shard}" for shard in shards), "tiny-Q8_0.gguf", "tiny-Q4_K_S.gguf", "mmproj-Q8_0.gguf"):
        (directory / place).write_bytes(f"GGUF {place}".encode() * 1000)
    hub.add("org/gguf", directory)
    assert isinstance(child.pull("org/gguf:q4_k_m:files", tmp_path / "sharded"), Fetched)
    assert isinstance(child.pull("org/gguf:Q8_0:files", tmp_path / "single"), Fetched)
    assert {file.name for file in (tmp_path / "sharded").glob("*.gguf*")} == set(shards)
    assert (tmp_path / "sharded" / shards[1]).read_bytes() == (directory / "Q4_K_M" / shards[1]).read_bytes()
    assert [file.name for file in (tmp_path / "single").glob("*.gguf*")] == ["tiny-Q8_0.gguf"]
    answer = failed(child.resolve("org/gguf:Q4_K", tmp_path / "none"))
    assert answer.message.endswith('has no GGUF file of "Q4_K"; it has Q4_K_M, Q4_K_S, Q8_0'), answer
    (directory / "Q4_K_M" / shards[1]).unlink()
    hub.add("org/half", directory)
    answer = failed(child.resolve("org/half:Q4_K_M", tmp_path / "none"))
    assert (
        "org/half:Q4_K_M has 1 of the 2 shards of Q4_K_M: choose another quantisation" in answer.message
        and answer.is_final
    )


@pytest.mark.extended
def test_search_tells_size_and_gates(hub: LoopbackHub, child: FetcherChild, original: Path) -> None:
    hub.add("org/gated", original, gated="auto")
    answer = child.search("org/", 5)
    assert isinstance(answer, SearchResult)
    found = {model.id: model for model in answer.models}
    assert found[REPO].num_bytes == weights_bytes(original) and not found[REPO].is_gated
    assert found["org/gated"].is_gated and found[REPO].downloads == 1234


@pytest.mark.extended
def test_a_busy_machine_still_gets_its_files(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    child.send(FetchPace(is_busy=True))
    assert isinstance(child.pull(REPO, tmp_path / "m"), Fetched)
    child.send(FetchPace(is_busy=False))
    assert is_same_model(tmp_path / "m", original)


@pytest.mark.extended
def test_a_hub_that_is_not_there_or_says_nothing_is_given_up_in_seconds(tmp_path: Path, hub: LoopbackHub) -> None:
    closed, silent = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in (closed, silent)]
    closed.close()
    with silent, contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(FetcherChild(fetcher_environ(hub, tmp_path, HF_ENDPOINT=url, NO_PROXY="127.0.0.1")))
            for url in urls
            for _ in range(2)
        ]
        began = time.monotonic()
        for child in children[::2]:
            child.send_search("org/", 5)
        for child in children[1::2]:
            child.send_resolve(REPO, tmp_path / "m")
        assert all("cannot be reached" in failed(child.answer()).message for child in children)
        assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: "hello", "gave an answer that is not a hub's"),
        (lambda info: info | {"sha": "../../.."}, "an invalid repository or commit"),
        (lambda info: info | {"siblings": [{"rfilename": None}]}, "it has no weights"),
        (lambda info: info | {"siblings": [one | {"size": -1} for one in info["siblings"]]}, "impossible size: -1"),
        (lambda info: info | {"siblings": [one | {"size": 2**70} for one in info["siblings"]]}, f"size: {2**70}"),
        (lambda info: info | {"siblings": [one | {"size": "big"} for one in info["siblings"]]}, 'size: "big"'),
        (lambda info: info | {"padding": " " * 17 * 2**20}, "more than 16777216 bytes"),
    ],
    ids=["no object", "revision", "no name", "negative size", "huge size", "no size", "17 MiB"],
)
def test_an_impossible_listing_is_refused_in_words(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    hub.faults.lists = change
    assert message in failed(child.resolve(REPO, tmp_path / "m")).message
    assert not list(tmp_path.iterdir())


def test_choosing_from_many_files_takes_no_longer_than_reading_their_names() -> None:
    names = [f"z{i}.json" for i in range(30_000)] + ["config.json"]
    began = time.process_time()
    chosen = text_files({name: FileInfo(10) for name in names}, with_code=False)
    assert time.process_time() - began < 5  # 0.1 s of CPU; with a look at all for each, 30 s
    assert next(iter(chosen)) == "config.json" and len(chosen) == MAX_TEXT_FILES


def test_answers_that_never_end_end_where_they_should(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    hub.faults.lists = lambda info: setattr(hub.faults, "has_ends", False) or info
    assert "more than 16777216 bytes" in failed(child.resolve(REPO, tmp_path / "m")).message
    hub.faults.has_ends, hub.faults.lists = True, lambda info: info
    assert not isinstance(child.resolve(REPO, tmp_path / "m"), FetchFailed)
    hub.faults.has_ends = False
    assert isinstance(child.fetch(tmp_path / "m"), Fetched)
    assert is_same_model(tmp_path / "m", original)


def test_a_header_that_cannot_be_names_model_and_file(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    directory = variant(original, tmp_path / "hub")
    file = directory / "model-00001-of-00003.safetensors"
    file.write_bytes((90 * 2**20).to_bytes(8, "little") + file.read_bytes()[8:])
    hub.add("org/header", directory)
    message = failed(child.resolve("org/header", tmp_path / "m")).message
    assert message.startswith(f"org/header: {file.name} is not a safetensors file"), message


def test_the_pooling_of_an_embedding_model_is_fetched_out_of_its_folder(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    repo = variant(original, tmp_path / "embedder")
    (repo / "1_Pooling").mkdir()
    write_json(repo / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True})
    (repo / "2_Dense").mkdir()
    write_json(repo / "2_Dense" / "config.json", {})
    write_json(repo / "modules.json", [{"type": "sentence_transformers.models.Pooling"}])
    hub.add("org/embedder", repo)
    assert not isinstance(child.pull("org/embedder", tmp_path / "m"), FetchFailed)
    assert read_embedding_settings(tmp_path / "m").pooling == "last"
    assert (tmp_path / "m" / "1_Pooling.config.json").is_file()
    assert not [path for path in (tmp_path / "m").iterdir() if path.is_dir()], "no folder was made"
    assert read_card(tmp_path / "m", "m").tasks == read_card(repo, "m").tasks == ("embeddings",)
    assert read_card(tmp_path / "m", "m").text_digest == read_card(repo, "m").text_digest
    for directory in (repo, tmp_path / "m"):
        listed = OfferedModel(directory, "", read_manifest(directory)).listing().files
        assert "1_Pooling.config.json" in listed and "modules.json" in listed


def test_the_template_for_tools_is_fetched_out_of_its_folder(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, original: Path
) -> None:
    repo = variant(original, tmp_path / "caller")
    (repo / "additional_chat_templates").mkdir()
    (repo / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    (repo / "chat_template.jinja").write_text("plain")
    hub.add("org/caller", repo)
    assert not isinstance(child.pull("org/caller", tmp_path / "m"), FetchFailed)
    for directory in (repo, tmp_path / "m"):
        template = find_template(directory, {})
        assert template is not None and template.tool_use is not None
        assert (template.source, template.tool_use.source) == ("plain", "with tools")
    assert read_card(tmp_path / "m", "m").text_digest == read_card(repo, "m").text_digest


def test_a_pooling_folder_that_is_a_link_is_not_followed(tmp_path: Path, original: Path) -> None:
    repo = variant(original, tmp_path / "embedder")
    (tmp_path / "elsewhere").mkdir()
    write_json(tmp_path / "elsewhere" / "config.json", {"secret": 1})
    (repo / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    assert "1_Pooling.config.json" not in OfferedModel(repo, "", None).listing().files
