"""Models are found by name, and by nothing that leads out of the model directories."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from exo_mesh.errors import ModelError, UnknownModelError
from exo_mesh.weights.fetched import Manifest, write_manifest
from exo_mesh.weights.store import RETRY_S, SHIPPED, ModelStore, model_dir_of
from tests.support.checkpoints import TinyModel, write_checkpoint


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    """One model of each layout, a directory that is none, and one beside it all."""
    root = tmp_path / "models"
    write_checkpoint(root / "flat", TinyModel(layers=1))
    write_checkpoint(root / "org" / "nested", TinyModel(layers=2))
    hub = root / "models--hub-org--some-model"
    write_checkpoint(hub / "snapshots" / "aaa", TinyModel(layers=3))
    write_checkpoint(hub / "snapshots" / "bbb", TinyModel(layers=4))
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("aaa")
    (root / "empty").mkdir()
    (root / "file").write_text("")
    write_checkpoint(tmp_path / "secret", TinyModel(layers=5))
    return root


def test_every_layout_is_found(models_dir: Path) -> None:
    store = ModelStore([models_dir, models_dir / "missing"])
    assert store.names() == sorted([SHIPPED, "flat", "org/nested", "hub-org/some-model"])
    assert store.find("flat") == models_dir / "flat"
    assert store.card("org/nested").num_layers == 2
    assert store.card("hub-org/some-model").num_layers == 3


def test_a_directory_may_have_a_revision_in_its_name(tmp_path: Path) -> None:
    for name in ("org/name", "org/name@v1.0", "org/name@@v"):
        write_checkpoint(tmp_path / name, TinyModel(layers=1))
    found = ModelStore((tmp_path,)).found()
    assert {"org/name", "org/name@v1.0"} < found.models.keys() and list(found.misnamed) == ["org/name@@v"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("tiny", "tiny"), ("org/tiny@v1.0", "org/tiny@v1.0"), ("tiny--x", "tiny--x"),
        ("Meine Modelle", "Meine-Modelle"), ("tiny (1)", "tiny-1"), ("My org/tiny [q8]", "My-org/tiny-q8"),
        ("Ma\u0308del gro\u00dfer", "M\u00e4del-gro\u00dfer"), ("\u00dcbung", "Ubung"), ("'tiny'", "tiny"),
        ("$(reboot)", "reboot"), ("a  -  b", "a-b"),
    ],
)  # fmt: skip
def test_a_model_in_a_directory_of_any_name_is_usable(tmp_path: Path, given: str, name: str) -> None:
    write_checkpoint(tmp_path / given, TinyModel(layers=1))
    store = ModelStore((tmp_path,))
    assert set(store.names()) == {SHIPPED, name} and not store.found().misnamed
    assert store.card(name).name == name and store.name_at(tmp_path / given) == name


def test_of_two_models_that_would_have_one_name_the_other_says_so(tmp_path: Path) -> None:
    for name in ("tiny (1)", "tiny-1", "tiny [1]", "\u6a21\u578b"):
        write_checkpoint(tmp_path / name, TinyModel(layers=1))
    found = ModelStore((tmp_path, tmp_path)).found()
    assert found.models["tiny-1"] == tmp_path / "tiny-1" and len(found.models) == 2
    assert found.misnamed == {
        "tiny (1)": "its name would be tiny-1, as that of another; rename it",
        "tiny [1]": "its name would be tiny-1, as that of another; rename it",
        "\u6a21\u578b": "its name has other characters than letters, digits and . _ - + @, so no request can use it; "
        "rename it",
    }


def test_the_newest_snapshot_is_taken_where_no_ref_names_one(models_dir: Path) -> None:
    hub = models_dir / "models--hub-org--some-model"
    (hub / "refs" / "main").unlink()
    os.utime(hub / "snapshots" / "bbb", (2e9, 2e9))
    assert ModelStore([models_dir]).find("hub-org/some-model").name == "bbb"


def test_a_pipe_in_place_of_a_ref_names_no_snapshot(models_dir: Path) -> None:
    main = models_dir / "models--hub-org--some-model" / "refs" / "main"
    main.unlink()
    os.mkfifo(main)
    assert ModelStore([models_dir]).card("hub-org/some-model").num_layers in (3, 4)


def test_the_shipped_model_is_always_there_and_cannot_be_replaced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / SHIPPED, TinyModel())
    store = ModelStore([tmp_path])
    assert store.names() == [SHIPPED]
    assert store.card(SHIPPED).architecture == "qwen3"


def test_the_first_directory_wins(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a" / "x", TinyModel(layers=1))
    write_checkpoint(tmp_path / "b" / "x", TinyModel(layers=2))
    assert ModelStore([tmp_path / "a", tmp_path / "b"]).card("x").num_layers == 1


@pytest.mark.parametrize(
    "name",
    [
        *("../secret", "org/../../secret", "../../etc", "/etc", "/", "./flat", ".", "..", "~"),
        *("", "org", "empty", "flat/", "org//nested", "a" * 5000, "flat\0", "flat\n", "/etc\0"),
    ],
)
def test_no_name_leads_out_of_the_model_directories(models_dir: Path, name: str) -> None:
    with pytest.raises(UnknownModelError):
        ModelStore([models_dir]).find(name)


def test_a_path_stands_for_the_model_in_that_directory_and_for_nothing_else(models_dir: Path) -> None:
    store = ModelStore([models_dir])
    assert store.name_at(models_dir / "flat") == "flat"
    assert store.name_at(models_dir / "org" / ".." / "org" / "nested") == "org/nested"
    assert store.name_at(models_dir / "models--hub-org--some-model" / "snapshots" / "aaa") == "hub-org/some-model"
    for path in (models_dir, models_dir / "empty", models_dir.parent / "secret", Path("/etc"), Path("/\0")):
        with pytest.raises(UnknownModelError, match="is not below a models directory"):
            store.name_at(path)


def test_a_command_takes_the_shipped_model_by_name_and_any_other_by_its_path(
    models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models_dir)
    assert model_dir_of("../secret") == models_dir / "../secret"
    assert model_dir_of(SHIPPED).name == SHIPPED
    with pytest.raises(UnknownModelError, match=r"no config.json"):
        model_dir_of("./empty")


def test_a_models_directory_may_be_a_model_itself(models_dir: Path) -> None:
    assert ModelStore([models_dir / "flat"]).names() == [SHIPPED, "flat"]


def test_one_real_directory_is_one_model_by_its_first_name(models_dir: Path) -> None:
    (models_dir / "zulu").symlink_to(models_dir / "flat")
    (models_dir / "alpha").symlink_to(models_dir / "org")
    store = ModelStore([models_dir, models_dir / "org", models_dir])
    assert store.names() == sorted([SHIPPED, "flat", "alpha/nested", "hub-org/some-model"])
    assert store.card("zulu").name == "flat" and store.card("org/nested").name == "alpha/nested"
    assert store.card("nested") is store.card("alpha/nested")


def test_an_unknown_model_is_answered_with_near_names(models_dir: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"near: .*hub-org/some-model") as caught:
        ModelStore([models_dir]).find("hub-org/some-modle")
    assert caught.value.param == "model"


def test_a_card_is_read_again_only_when_a_file_has_changed(models_dir: Path) -> None:
    store = ModelStore([models_dir])
    first = store.card("flat")
    assert store.card("flat") is first
    write_checkpoint(models_dir / "flat", TinyModel(layers=2))
    assert store.card("flat").num_layers == 2


def test_a_broken_model_has_a_name_but_no_card(models_dir: Path) -> None:
    (models_dir / "flat" / "tokenizer.json").unlink()
    store = ModelStore([models_dir])
    assert "flat" in store.names()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        store.card("flat")


def test_the_blobs_of_a_hugging_face_cache_are_part_of_the_model(tmp_path: Path) -> None:
    """And those of another model beside it are not, nor is what the blobs link to."""
    hub = in_blobs(tmp_path / "models--org--linked")
    other = in_blobs(tmp_path / "models--org--other")
    store = ModelStore([tmp_path])
    assert store.card("org/linked").digest == store.card("org/other").digest
    config = hub / "snapshots" / "rev" / "config.json"
    for target in (other / "blobs" / "config.json", tmp_path / "outside"):
        (tmp_path / "outside").write_text("{}")
        config.unlink()
        config.symlink_to(target)
        with pytest.raises(ModelError, match=r"org/linked: config\.json is a link that leads out"):
            store.card("org/linked")
    (hub / "blobs").rename(tmp_path / "elsewhere")
    (hub / "blobs").symlink_to(tmp_path / "elsewhere")
    config.unlink()
    config.symlink_to("../../blobs/config.json")
    with pytest.raises(ModelError, match="leads out"):
        store.card("org/linked")


def in_blobs(hub: Path) -> Path:
    """A model as the Hugging Face cache has it: every file of the snapshot is a link to a blob."""
    write_checkpoint(hub / "blobs", TinyModel(layers=1))
    snapshot = hub / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    for blob in (hub / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    return hub


def test_a_model_that_cannot_be_used_is_read_once_until_it_changes(models_dir: Path) -> None:
    store = ModelStore([models_dir])
    (models_dir / "flat" / "config.json").write_text("{}")
    reasons = []
    for _ in range(2):
        with pytest.raises(ModelError) as caught:
            store.card("flat")
        reasons.append(str(caught.value))
    assert reasons == ["flat: config.json has no usable num_hidden_layers: null"] * 2
    write_checkpoint(models_dir / "flat", TinyModel(layers=2))
    assert store.card("flat").num_layers == 2


def test_a_file_that_could_not_be_read_is_tried_again_after_a_while(models_dir: Path) -> None:
    now = 0.0
    store = ModelStore([models_dir], clock=lambda: now)
    config = models_dir / "flat" / "config.json"
    kept = config.read_bytes()
    config.unlink()
    config.symlink_to("nothing")
    with pytest.raises(ModelError, match="does not exist"):
        store.card("flat")
    stamp = config.lstat()
    (models_dir / "flat" / "nothing").write_bytes(kept)  # no name that is looked at, so only time tells
    os.utime(models_dir / "flat" / "nothing", ns=(stamp.st_mtime_ns, stamp.st_mtime_ns))
    now = RETRY_S
    assert store.card("flat").num_layers == 1


def test_a_directory_that_vanishes_is_no_model(models_dir: Path) -> None:
    store = ModelStore([models_dir])
    model_dir = store.find("flat")
    shutil.rmtree(model_dir)
    with pytest.raises(ModelError, match="flat: the directory cannot be read"):
        store.card_at("flat", model_dir)
    with pytest.raises(UnknownModelError):
        store.card("flat")


def test_damaged_files_of_a_fetched_model_name_a_remedy_and_those_of_others_do_not(tmp_path: Path) -> None:
    for name in ("org/fetched", "own"):
        model_dir = write_checkpoint(tmp_path / name, TinyModel(layers=1))
        weights = model_dir / "model.safetensors"
        os.truncate(weights, weights.stat().st_size - 100)
    write_manifest(tmp_path / "org" / "fetched", Manifest("org/fetched"))
    store = ModelStore((tmp_path,))
    remedy = "delete the model with `exo-mesh rm org/fetched`, then fetch it again with `exo-mesh pull org/fetched`"
    with pytest.raises(ModelError, match=f"it is cut short; {remedy}"):
        store.card("org/fetched")
    with pytest.raises(ModelError, match=r"it is cut short$"):
        store.card("own")


def test_a_folder_with_one_gguf_file_names_that_model(tmp_path: Path) -> None:
    store = ModelStore([tmp_path, tmp_path / "one"], views_dir=tmp_path / "views")
    for name in ("one/tiny.gguf", "two/a-Q8_0.gguf", "two/a-F16.gguf", "odd/tiny (1).gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert store.name_at(tmp_path / "one") == store.name_at(tmp_path / "one" / "tiny.gguf") == "one"
    with pytest.raises(UnknownModelError, match=r"two has 2 models: two-(F16|Q8_0), two-.*; name one of them"):
        store.name_at(tmp_path / "two")


def test_a_gguf_file_whose_name_no_model_may_have_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "\u6a21\u578b.gguf").touch()
    store = ModelStore([tmp_path], views_dir=tmp_path / "views")
    with pytest.raises(ModelError, match=re.escape("\u6a21\u578b: its name has other characters")):
        store.name_at(tmp_path / "\u6a21\u578b.gguf")
