"""Which texts are paths of models, and where a node finds the model at a path."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.main import main
from exo_mesh.cli.model_paths import existing_path, model_name, models_dir_for, path_hint
from exo_mesh.cli.model_verbs import module_of
from exo_mesh.cli.parser import Parser
from exo_mesh.cli.wiring import _why_missing
from exo_mesh.errors import UnknownModelError
from tests.support.checkpoints import TinyModel, write_checkpoint


def test_a_gguf_file_that_is_here_is_a_path_without_any_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "tiny-Q8_0.gguf"
    assert model_name(file.name) == file.name, "a name in the mesh as long as no such file is here"
    file.touch()
    assert model_name(file.name) == model_name(f"./{file.name}") == str(file)
    assert model_name("org/name:Q4_K_M") == "org/name:Q4_K_M"


def test_a_directory_that_no_name_could_mean_is_a_path_without_any_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    snapshot = Path("hub/models--org--tiny/snapshots/abc")
    for directory in (snapshot, Path("org/tiny"), Path("my models")):
        directory.mkdir(parents=True)
    assert model_name(str(snapshot)) == str(tmp_path / snapshot)
    assert model_name("my models") == model_name("my models/") == str(tmp_path / "my models")
    assert model_name("org/tiny") == "org/tiny", "the hub may have it"
    assert path_hint("org/tiny") == "; for the directory org/tiny write ./org/tiny"
    assert path_hint("tiny.gguf") == "; there is no file tiny.gguf here"
    assert path_hint("org/other") == path_hint("/nothing") == ""


@pytest.mark.parametrize("verb", ["run", "show", "load", "preview", "pull", "rm", "stop"])
def test_every_verb_takes_the_path_of_a_model(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my tiny.gguf").touch()
    parser = Parser(prog=f"exo-mesh {verb}")
    importlib.import_module(module_of(verb)).add_arguments(parser)
    for text in ("my tiny.gguf", "./my tiny.gguf", str(tmp_path / "my tiny.gguf")):
        args = parser.parse_all([text])
        assert (args.instance if verb == "stop" else args.model) == str(tmp_path / "my tiny.gguf")
    assert main([verb, "./none.gguf"]) == exit_codes.FAILED
    assert capsys.readouterr().err == f"exo-mesh: ./none.gguf does not exist ({tmp_path}/none.gguf)\n"


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
    with pytest.raises(UnknownModelError, match=r"none\.gguf does not exist"):
        models_dir_for(tmp_path / "none.gguf")


def test_a_file_as_models_directory_is_answered_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    assert _why_missing(tmp_path / "tiny.gguf") == f"is a file: name its folder, {tmp_path}"
    assert _why_missing(tmp_path / "none") == "does not exist"
