"""Libraries, Python and macOS that are too old are named at the start, with what to do."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from exo_mesh_mlx.provider import MlxProvider
from exo_mesh_torch.provider import TorchProvider

import exo_mesh
from exo_mesh.engine import floors
from exo_mesh.engine.floors import Floor, floors_in, is_older, too_old

REQUIREMENTS = [
    "aiohttp<4,>=3.14",
    'uvloop>=0.21; sys_platform != "win32"',
    'mlx[cpu]>=0.32; sys_platform == "linux" and extra == "mlx"',
    "transformers>=5.23; extra == 'torch'",
    "import-linter==2.*",
    'torch; extra == "train"',
]

needs_requirements = pytest.mark.skipif(
    not floors.own_floors(), reason="exo-mesh is not installed here, and only an installed package has requirements"
)


def test_the_floors_are_those_of_the_requirements() -> None:
    assert floors_in(REQUIREMENTS) == [
        Floor("aiohttp", "3.14"),
        Floor("uvloop", "0.21"),
        Floor("mlx", "0.32", "mlx"),
        Floor("transformers", "5.23", "torch"),
    ]


@pytest.mark.parametrize(
    ("version", "needed", "older"),
    [
        ("0.9", "0.32", True),
        ("0.32.4", "0.32", False),
        ("0.32", "0.32.1", True),
        ("14", "14.0", False),
        ("1.76.0rc1", "1.76", False),
        ("2.8.0+cpu", "2.8", False),
        ("13.6.1", "14.0", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, needed: str, older: bool) -> None:
    assert is_older(version, needed) is older


def test_each_library_that_is_too_old_is_named_once_and_a_missing_one_is_not() -> None:
    versions = {"aiohttp": "3.9.1", "mlx": "0.20", "transformers": ""}
    found = floors_in(REQUIREMENTS)
    said = too_old(floors=found, version_of=lambda name: versions.get(name, ""))
    assert said == "aiohttp 3.9.1 is too old, 3.14 or newer is needed"
    assert too_old("mlx", found, versions.__getitem__) == "mlx 0.20 is too old, 0.32 or newer is needed"
    assert too_old("torch", found, versions.__getitem__) == ""


def stub(folder: Path, name: str, version: str) -> str:
    """The folder with the metadata of an installed library, as pip writes it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder)


@needs_requirements
def test_a_node_with_an_old_grpc_does_not_start_and_says_what_to_do(tmp_path: Path) -> None:
    path = [stub(tmp_path / "site", "grpcio", "1.40.0"), *sys.path]
    code = f"import sys; sys.path[:] = {path!r}; from exo_mesh.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-S", "-c", code, "serve", "--home", str(tmp_path / "home")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "exo-mesh: grpcio 1.40.0 is too old, 1.76 or newer is needed: pip install --upgrade exo-mesh\n"
    )


class EverythingInstalled:
    """Every package can be found."""

    @staticmethod
    def find_spec(name: str) -> str:
        return name


@needs_requirements
@pytest.mark.parametrize(("library", "engine"), [("mlx", "mlx"), ("transformers", "torch")])
def test_an_engine_whose_library_is_too_old_cannot_run_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, engine: str
) -> None:
    monkeypatch.syspath_prepend(stub(tmp_path, library, "0.1"))
    monkeypatch.setattr(sys.modules[f"exo_mesh_{engine}.provider"], "util", EverythingInstalled)
    found = (MlxProvider() if engine == "mlx" else TorchProvider()).availability()
    assert not found.available and found.reason.startswith(f"{library} 0.1 is too old")
    assert found.remedy == f'pip install --upgrade "exo-mesh[{engine}]"'


def test_an_old_macos_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["exo_mesh_mlx.provider"], "util", EverythingInstalled)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    for version, reason in (("13.6", "macOS 13.6 is too old, MLX needs 14.0 or newer"), ("26.2", "Apple silicon")):
        said = version, ("", "", ""), "arm64"
        monkeypatch.setattr(platform, "mac_ver", lambda said=said: said)
        assert MlxProvider().availability().reason == reason


@pytest.mark.parametrize(
    ("system", "machine", "libc", "macos", "obstacle"),
    [
        ("linux", "x86_64", ("glibc", "2.36"), "", ""),
        ("linux", "aarch64", ("glibc", "2.35"), "", ""),
        ("linux", "aarch64", ("glibc", "2.31"), "", "MLX has no wheel for glibc 2.31 (it needs 2.35 or newer)"),
        ("linux", "x86_64", ("", ""), "", "MLX has no wheel for Linux with a C library other than glibc"),
        ("linux", "riscv64", ("glibc", "2.39"), "", "MLX has no wheel for linux on riscv64"),
        ("darwin", "arm64", ("", ""), "26.2", ""),
        ("darwin", "arm64", ("", ""), "13.6", "MLX has no wheel for macOS 13.6 (it needs 14.0 or newer)"),
        ("darwin", "x86_64", ("", ""), "14.5", "MLX has no wheel for macOS on x86_64"),
    ],
)
def test_a_machine_without_a_wheel_of_mlx_is_named(
    system: str, machine: str, libc: tuple[str, str], macos: str, obstacle: str
) -> None:
    assert floors.mlx_obstacle(system, machine, libc, macos) == obstacle


class NothingInstalled:
    """No package can be found."""

    @staticmethod
    def find_spec(name: str) -> None:
        return None


def test_where_mlx_has_no_wheel_the_engine_says_so_and_what_else_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["exo_mesh_mlx.provider"], "util", NothingInstalled)
    monkeypatch.setattr(sys.modules["exo_mesh_mlx.provider"], "mlx_obstacle_here", lambda: "MLX has no wheel for X")
    found = MlxProvider().availability()
    assert (found.available, found.reason) == (False, "MLX has no wheel for X")
    assert "numpy" in found.remedy and "pip install" in found.remedy


def test_an_old_python_is_named_with_what_to_do() -> None:
    assert exo_mesh.python_fault((3, 11, 0)) == "" == exo_mesh.python_fault((4, 0))
    assert exo_mesh.python_fault((3, 10, 9)).startswith(
        "exo-mesh needs Python 3.11 or newer, but this is Python 3.10.9"
    )
