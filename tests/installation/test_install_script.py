"""scripts/install.sh: what it chooses on which machine, and that it touches nothing but what is its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from exo_mesh.engine import floors
from tests.support.installs import ROOT

SCRIPT = ROOT / "scripts/install.sh"
SHELL = shutil.which("dash") or "/bin/sh"

if sys.platform == "win32":
    pytest.skip("a script for POSIX shells", allow_module_level=True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    found = tmp_path / "home"
    found.mkdir()
    return found


def program(folder: Path, name: str, *lines: str) -> None:
    """A program that stands in for one of the machine's, such as `uname`, and says `lines`."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    (folder / name).chmod(0o755)


def linux(home: Path, glibc: str | None, machine: str = "x86_64") -> None:
    shims = home.parent / "shims"
    program(shims, "uname", f'[ "$1" = -s ] && echo Linux || echo {machine}')
    program(shims, "getconf", f"echo glibc {glibc}" if glibc else "exit 1")


def macos(home: Path, version: str, machine: str = "arm64") -> None:
    shims = home.parent / "shims"
    program(shims, "uname", f'[ "$1" = -s ] && echo Darwin || echo {machine}')
    program(shims, "sw_vers", f"echo {version}")


def install(home: Path, *args: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    shims = home.parent / "shims"
    shims.mkdir(exist_ok=True)
    if python and not (shims / "python3").exists():
        (shims / "python3").symlink_to(python)
    return subprocess.run(
        [SHELL, str(SCRIPT), *args],
        capture_output=True, text=True, timeout=60, check=False, cwd=home,
        env={"HOME": str(home), "PATH": f"{shims}:/usr/bin:/bin", "LC_ALL": "C"},
    )  # fmt: skip


def extras_of(said: subprocess.CompletedProcess[str]) -> str:
    assert said.returncode == 0, said.stderr
    line = next(line for line in said.stdout.splitlines() if line.startswith("extras: "))
    return line.removeprefix("extras: ")


@pytest.mark.parametrize(
    ("glibc", "machine", "chosen"),
    [
        ("2.36", "x86_64", "mlx, glibc 2.36, no NVIDIA GPU: MLX computes on the CPU"),
        ("2.35", "aarch64", "mlx, "),
        ("2.31", "x86_64", "none, MLX has no wheel for glibc 2.31 (it needs 2.35 or newer): the NumPy engine is used"),
        ("2.36", "riscv64", "none, MLX has no wheel for riscv64"),
        (None, "x86_64", "none, this machine has no glibc"),
    ],
)
def test_it_chooses_the_engine_by_the_c_library(home: Path, glibc: str | None, machine: str, chosen: str) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA GPU, which comes first")
    linux(home, glibc, machine)
    assert extras_of(install(home, "--dry-run")).startswith(chosen)


@pytest.mark.parametrize(
    ("version", "machine", "chosen"),
    [
        ("26.2", "arm64", "mlx, "),
        ("13.6.1", "arm64", "torch, MLX has no wheel for macOS 13.6.1"),
        ("14.0", "x86_64", "none, "),
    ],
)
def test_it_chooses_the_engine_by_the_mac(home: Path, version: str, machine: str, chosen: str) -> None:
    macos(home, version, machine)
    assert extras_of(install(home, "--dry-run")).startswith(chosen)


@pytest.mark.parametrize(("glibc", "noted"), [("2.28", True), (None, True), ("2.31", False), ("2.36", False)])
def test_where_libraries_must_be_compiled_it_says_so(home: Path, glibc: str | None, noted: bool) -> None:
    linux(home, glibc)
    assert ("needs a C and a Rust compiler" in install(home, "--dry-run").stdout) is noted


def test_mlx_on_an_old_glibc_is_refused_with_one_sentence(home: Path) -> None:
    linux(home, "2.31")
    said = install(home, "--dry-run", "--extras", "mlx")
    assert said.returncode == 1
    assert said.stderr == (
        "install.sh: MLX has no wheel for glibc 2.31 (it needs glibc 2.35 or newer): "
        "use --extras torch, or --extras none for the NumPy engine\n"
    )
    assert extras_of(install(home, "--dry-run", "--extras", "torch")) == "torch, as requested with --extras"


def test_a_dry_run_says_each_step_and_changes_nothing(home: Path) -> None:
    linux(home, "2.36")
    said = install(home, "--dry-run", "--extras", "none")
    steps = [line.removeprefix("would run: ") for line in said.stdout.splitlines() if line.startswith("would run: ")]
    environment = f"{home}/.local/lib/exo-mesh"
    assert steps[1].endswith(f"-m venv {environment}")
    assert steps[2].startswith(f"{environment}/bin/python -m pip install ") and steps[2].endswith(str(ROOT))
    assert steps[-1] == f"ln -sfn {environment}/bin/exo-mesh {home}/.local/bin/exo-mesh"
    assert list(home.iterdir()) == []


def test_a_python_that_is_too_old_is_named(home: Path) -> None:
    program(home.parent / "shims", "python3", 'case "$1" in -V) echo Python 3.9.2 ;; *) exit 1 ;; esac')
    for name in ("python3.11", "python3.12", "python3.13", "python3.14", "python"):
        program(home.parent / "shims", name, "exit 1")
    said = install(home, "--dry-run", python="")
    assert said.stderr.startswith("install.sh: found Python 3.9.2, but exo-mesh needs Python 3.11 or newer")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--extras", "jax"], "unknown engine; choose from mlx torch llamacpp, or none"),
        (["--from", "gone.whl"], "gone.whl: file not found"),
        (["--from", "."], ". is neither a checkout of exo-mesh, nor a wheel or sdist"),
        (["--frm", "x"], "unknown argument --frm"),
        (["--from"], "--from needs a value"),
        (["--version"], "is not installed in"),
    ],
)
def test_wrong_arguments_are_named(home: Path, args: list[str], complaint: str) -> None:
    said = install(home, *args)
    assert said.returncode == 1
    assert complaint in said.stderr
    assert list(home.iterdir()) == []


def test_what_it_did_not_make_is_neither_removed_nor_replaced(home: Path) -> None:
    foreign = home / ".local/lib/exo-mesh/notes.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    for args in (["--extras", "none"], ["--uninstall"]):
        said = install(home, *args)
        assert (said.returncode, foreign.read_text()) == (1, "mine")
        assert "is not a virtual environment: move it away" in said.stderr


def test_its_floors_and_extras_are_those_of_the_package() -> None:
    script = SCRIPT.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    values = dict(re.findall(r'^([A-Z_]+)="?([^"#\n]*[^"#\s])', script, re.MULTILINE))
    assert f">={values['OLDEST_PYTHON']}" == project["requires-python"]
    assert (values["OLDEST_GLIBC"], values["OLDEST_MACOS"]) == (floors.GLIBC_FLOOR, floors.MACOS_FLOOR)
    assert set(values["ENGINE_EXTRAS"].split()) <= project["optional-dependencies"].keys()


def test_the_page_names_each_extra_and_true_floors() -> None:
    page = (ROOT / "docs/start/installation.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = page.partition("| extra | brings | floors |")[2].partition("\n\n")[0]
    assert set(project["optional-dependencies"]) <= set(re.findall(r"`([a-z]+)`", rows))
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    known = {(floor.library, floor.needed) for one in lists for floor in floors.floors_in(one)}
    named = re.findall(r"(aiohttp|grpcio|protobuf|numpy|mlx|mlx-lm|torch|transformers|matplotlib) ([0-9.]+[0-9])", rows)
    assert len(named) >= 9 and set(named) <= known


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    checked = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout
