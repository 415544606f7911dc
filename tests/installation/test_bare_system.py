"""scripts/install.sh on a system that has Python and nothing else, up to the first token of the demo model."""

from __future__ import annotations

import pwd
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.installation.conftest import BareSystem
from tests.support.installs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

HOME = pwd.getpwuid(0).pw_dir
COMMAND = f"{HOME}/.local/bin/exo-mesh"


@pytest.fixture(scope="module")
def system(copy_of_bare_root: Callable[[], BareSystem], built_wheel: Path) -> Iterator[BareSystem]:
    found = copy_of_bare_root()
    (found.root / "src").mkdir()
    shutil.copy(built_wheel, found.root / "src")
    shutil.copy(ROOT / "scripts/install.sh", found.root / "src")
    yield found
    shutil.rmtree(found.root)


def install(system: BareSystem, wheel: Path, *args: str) -> str:
    """Run the script as a user would who has the wheel; answers what it said."""
    done = system.run("sh", "/src/install.sh", "--from", f"/src/{wheel.name}", *args)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("dev/nvidiactl", "", "extras: torch, an NVIDIA GPU"),
        ("dev/kfd", "", "note: an AMD GPU needs PyTorch's build for ROCm"),
        ("proc/device-tree/compatible", "radxa,rock-5b\0rockchip,rk3588\0", "note: this is an RK3588"),
    ],
)
def test_it_sees_accelerators(system: BareSystem, built_wheel: Path, file: str, content: str, said: str) -> None:
    path = system.root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    script = ["sh", "/src/install.sh", "--dry-run", "--from", f"/src/{built_wheel.name}"]
    command = ["chroot", str(system.root), "env", "-i", f"HOME={HOME}", "PATH=/usr/bin:/bin", *script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    finally:
        path.unlink()
        if path.parent.name == "device-tree":
            path.parent.rmdir()
    assert said in done.stdout
    assert not (system.root / "root/.local").exists()


@pytest.fixture(scope="module")
def installed(system: BareSystem, built_wheel: Path) -> str:
    """What the first installation said."""
    return install(system, built_wheel)


def test_it_installs_up_to_the_first_token(system: BareSystem, installed: str) -> None:
    assert "extras: mlx, glibc 2.36" in installed
    assert installed.splitlines()[-1].startswith(f"next: {COMMAND} demo")
    shown = system.run(COMMAND, "demo", "--once", timeout_s=300)
    assert shown.returncode == 0, shown.stderr
    assert ", ".join(str(number) for number in range(7, 21)) in shown.stdout
    assert "layers 0-3, mlx" in shown.stdout


@pytest.mark.usefixtures("installed")
def test_a_second_time_it_keeps_what_is_there(system: BareSystem, built_wheel: Path) -> None:
    said = install(system, built_wheel)
    assert "keeping: mlx===" in said
    assert "Collecting" not in said, "nothing is fetched again"
    assert "a running node keeps the old version" in said
    assert system.run("sh", "/src/install.sh", "--version").stdout.startswith("exo-mesh 0.")


@pytest.mark.usefixtures("installed")
def test_it_removes_what_it_made_and_keeps_the_nodes_files(system: BareSystem) -> None:
    mine = system.root / "root/.local/share/exo-mesh/models/notes.txt"
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    removed = system.run("sh", "/src/install.sh", "--uninstall")
    assert removed.returncode == 0, removed.stderr
    assert not (system.root / "root/.local/lib/exo-mesh").exists()
    assert not (system.root / "root/.local/bin/exo-mesh").is_symlink()
    assert mine.read_text() == "mine"
    assert "is not installed" in system.run("sh", "/src/install.sh", "--uninstall").stdout
