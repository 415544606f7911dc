"""Which texts are paths of models, and where a node finds the model at a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_mesh.cli.model_paths import existing_path, model_name, models_dir_for
from exo_mesh.errors import UnknownModelError
from tests.support.checkpoints import TinyModel, write_checkpoint


def test_a_gguf_file_that_is_here_is_a_path_without_any_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "tiny-Q8_0.gguf"
    assert model_name(file.name) == file.name, "a name in the mesh as long as no such file is here"
    file.touch()
    assert model_name(file.name) == model_name(f"./{file.name}") == str(file)
    assert model_name("org/name:Q4_K_M") == "org/name:Q4_K_M"


@pytest.mark.parametrize("name", ["nothing.gguf", "notes.txt", "model-00002-of-00002.gguf"])
def test_what_is_no_model_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "model-00002-of-00002.gguf").touch()
    with pytest.raises(UnknownModelError, match=f"{name} (does not exist|is neither)"):
        existing_path(str(tmp_path / name))


def test_a_node_finds_a_file_in_its_folder_and_a_folder_by_itself(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "folder", TinyModel(layers=1))
    (tmp_path / "files").mkdir()
    file = tmp_path / "files" / "tiny.gguf"
    file.touch()
    assert models_dir_for(folder) == folder
    assert models_dir_for(file) == models_dir_for(file.parent) == file.parent
    with pytest.raises(UnknownModelError, match="it has no config"):
        models_dir_for(tmp_path)
