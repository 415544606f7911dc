"""The wheel has what a user needs, and nothing else."""

from __future__ import annotations

import configparser
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.installs import ROOT, own_wheel

MAX_WHEEL_BYTES = 14 * 10**6
MAX_MODEL_BYTES = 12 * 10**6
DEMO = "exo_mesh/weights/shipped/exo-mesh-demo/"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from a copy of the tree, with the setuptools of this environment: no network, nothing left behind."""
    with zipfile.ZipFile(own_wheel(tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


def metadata_file(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(next(path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))).decode()


def test_it_is_small(wheel: zipfile.ZipFile) -> None:
    assert Path(wheel.filename or "").stat().st_size < MAX_WHEEL_BYTES


def test_it_has_the_demo_model(wheel: zipfile.ZipFile) -> None:
    sizes = {info.filename.removeprefix(DEMO): info.file_size for info in wheel.infolist() if DEMO in info.filename}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= sizes.keys()
    assert sum(sizes.values()) <= MAX_MODEL_BYTES
    template = "chat_template.jinja" in sizes or b"chat_template" in wheel.read(DEMO + "tokenizer_config.json")
    assert template


def test_it_has_every_module_and_no_tests_or_tools(wheel: zipfile.ZipFile) -> None:
    modules = {name for name in wheel.namelist() if name.endswith(".py")}
    packages = {str(path.relative_to(ROOT)) for path in (ROOT / "exo_mesh").rglob("*.py")}
    engines = {str(path.relative_to(ROOT / "engines")) for path in (ROOT / "engines").rglob("*.py")}
    assert modules == packages | engines
    assert {"exo_mesh/wire/proto/control_pb2.py", "exo_mesh/wire/proto/control_pb2.pyi", "exo_mesh/py.typed"} <= set(
        wheel.namelist()
    )


def test_it_has_every_file_that_lies_beside_the_modules(wheel: zipfile.ZipFile) -> None:
    """A new kind of file needs a pattern under tool.setuptools.package-data."""
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "exo_mesh").rglob("*") if path.is_file()}
    missing = wanted - set(wheel.namelist())
    assert {name for name in missing if "__pycache__" not in name and not name.endswith("/README.md")} == set()


def test_it_has_the_command_and_the_engines(wheel: zipfile.ZipFile) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(metadata_file(wheel, "entry_points.txt"))
    assert dict(entry_points["console_scripts"]) == {"exo-mesh": "exo_mesh.cli.main:main"}
    assert {"mlx", "dummy"} <= set(entry_points["exo_mesh.engines"])


def test_it_has_the_templates_of_the_service(wheel: zipfile.ZipFile) -> None:
    folder = "exo_mesh/cli/services/units"
    there = {name for name in wheel.namelist() if name.startswith(folder)}
    assert there == {f"{folder}/{path.name}" for path in (ROOT / folder).iterdir()}


def test_it_has_the_licence_and_the_python_it_needs(wheel: zipfile.ZipFile) -> None:
    assert "Apache License" in metadata_file(wheel, "licenses/LICENSE")
    metadata = Parser().parsestr(metadata_file(wheel, "METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def test_the_package_and_its_metadata_agree_on_the_version() -> None:
    from exo_mesh import __version__

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__
