"""The sdist and the wheel: equal bytes from any folder at any time, and only what belongs in them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from tests.installation.checkout import build, copy_checkout, tracked_files

pytestmark = pytest.mark.slow

FOLDERS = {
    "docs", "engines", "examples", "exo_mesh", "hostfiles", "monitoring", "nginx", "protos", "scripts", "systemd",
}  # fmt: skip
FILES = {
    ".dockerignore", "CONTRIBUTING.md", "Dockerfile", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "compose.yaml",
    "pyproject.toml", "setup.py",
}  # fmt: skip
GENERATED = {"PKG-INFO", "setup.cfg"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def other_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same files elsewhere, with other times and modes, and with the leftovers of an earlier build."""
    found = copy_checkout(tmp_path_factory.mktemp("second") / "below" / "another")
    for path in found.rglob("*.py"):
        os.utime(path, (1, time.time() + 86400))
        path.chmod(path.stat().st_mode & 0o100 | 0o600)
    stale = found / "build/lib/exo_mesh/gone.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("raise RuntimeError('a module of an earlier version')\n")
    (found / "exo_mesh.egg-info").mkdir()
    (found / "exo_mesh.egg-info/SOURCES.txt").write_text("tests/conftest.py\n")
    cached = found / "docs/__pycache__/notes.cpython-311.pyc"
    cached.parent.mkdir()
    cached.write_bytes(b"")
    return found


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def members(sdist: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(sdist) as archive:
        return archive.getmembers()


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_two_builds_have_equal_bytes_whatever_the_folder_the_time_the_umask_and_the_leftovers(
    kind: str, request: pytest.FixtureRequest, other_tree: Path, tmp_path: Path
) -> None:
    first: Path = request.getfixturevalue(kind)
    second = build(kind, other_tree, tmp_path, umask=0o077)
    assert first.name == second.name
    assert digest(first) == digest(second)


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "out")
    assert digest(again) == digest(wheel)


def test_source_date_epoch_is_the_time_of_every_file(tree: Path, tmp_path: Path) -> None:
    epoch = 1_700_000_000
    environ = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
    assert {member.mtime for member in members(build("sdist", tree, tmp_path, environ=environ))} == {epoch}
    with zipfile.ZipFile(build("wheel", tree, tmp_path, environ=environ)) as archive:
        assert {info.date_time for info in archive.infolist()} == {time.gmtime(epoch)[:6]}


def test_the_sdist_has_what_git_tracks_in_its_folders_and_nothing_else(sdist: Path) -> None:
    names = [PurePosixPath(member.name) for member in members(sdist) if member.isfile()]
    inside = {str(PurePosixPath(*name.parts[1:])) for name in names}
    inside = {name for name in inside if not name.startswith("exo_mesh.egg-info/")} - GENERATED
    wanted = {name for name in tracked_files() if name in FILES or (name.partition("/")[0] in FOLDERS and "/" in name)}
    assert inside == wanted


def test_nobody_of_the_building_machine_is_named_in_the_sdist(sdist: Path) -> None:
    found = {(member.uid, member.gid, member.uname, member.gname) for member in members(sdist)}
    assert found == {(0, 0, "", "")}
    assert {member.mode for member in members(sdist)} <= {0o644, 0o755}


def test_twine_finds_nothing_to_complain_about(sdist: Path, wheel: Path) -> None:
    twine = shutil.which("twine", path=os.pathsep.join([os.environ.get("PACKAGING_TOOLS", ""), os.environ["PATH"]]))
    if twine is None:
        pytest.skip("twine is not installed; PACKAGING_TOOLS names a folder with it")
    checked = subprocess.run(
        [twine, "--no-color", "check", "--strict", str(sdist), str(wheel)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count("PASSED") == 2
