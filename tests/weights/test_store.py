"""Models are found by name, and by nothing that leads out of the model directories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exo_mesh.errors import ModelError, UnknownModelError
from exo_mesh.weights.store import SHIPPED, ModelStore
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


def test_the_newest_snapshot_is_taken_where_no_ref_names_one(models_dir: Path) -> None:
    hub = models_dir / "models--hub-org--some-model"
    (hub / "refs" / "main").unlink()
    os.utime(hub / "snapshots" / "bbb", (2e9, 2e9))
    assert ModelStore([models_dir]).find("hub-org/some-model").name == "bbb"


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
    "name", ["../secret", "org/../../secret", "/etc", "./flat", "", ".", "..", "org", "empty", "flat/", "a" * 5000, "~"]
)
def test_no_name_leads_out_of_the_model_directories(models_dir: Path, name: str) -> None:
    with pytest.raises(UnknownModelError):
        ModelStore([models_dir]).find(name)


def test_paths_are_taken_only_when_allowed(models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ModelStore([models_dir])
    secret = models_dir.parent / "secret"
    with pytest.raises(UnknownModelError):
        store.find(str(secret))
    assert store.find(str(secret), allow_paths=True) == secret
    monkeypatch.chdir(models_dir)
    assert store.find("../secret", allow_paths=True) == secret
    assert store.card("./flat", allow_paths=True).num_layers == 1
    with pytest.raises(UnknownModelError, match=r"no config.json"):
        store.find("./empty", allow_paths=True)


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


def test_text_files_are_those_that_exist(models_dir: Path) -> None:
    names = [file.name for file in ModelStore([models_dir]).text_files("flat")]
    assert names == ["tokenizer.json", "tokenizer_config.json", "config.json"]
