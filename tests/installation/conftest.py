"""A bare system to install into: Debian's smallest with Python, and nothing of this machine but its way to packages."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.installation.checkout import build, copy_checkout

CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
LENT = ("etc/resolv.conf", "etc/hosts", "etc/pip.conf")
"""How this machine reaches a package index."""
LENT_VARIABLES = (
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_DEFAULT_TIMEOUT",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
)


@dataclass(frozen=True)
class BareSystem:
    """A root directory in which commands run with an empty environment, as process 1 of namespaces of their own."""

    root: Path

    def command(self, argv: Sequence[str]) -> list[str]:
        lent = [f"{name}={os.environ[name]}" for name in LENT_VARIABLES if name in os.environ]
        return [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--root", str(self.root), "--mount-proc=/proc"),
            *("env", "-i", "HOME=/root", "PATH=/usr/bin:/bin", "LC_ALL=C.UTF-8", f"PIP_CERT=/{CERTIFICATES}", *lent),
            *argv,
        ]

    def run(self, *argv: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(argv), capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="session")
def bare_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by debootstrap, or a copy of the one that BARE_ROOT names. Skips the test where it cannot be had."""
    if os.getuid() != 0:
        pytest.skip("this needs root: it makes a system of its own to install into")
    for program in ("debootstrap", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    root = tmp_path_factory.mktemp("bare") / "root"
    if given := os.environ.get("BARE_ROOT"):
        subprocess.run(["cp", "-a", given, str(root)], check=True, timeout=300)
    else:
        command = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm"]
        made = subprocess.run([*command, str(root)], capture_output=True, text=True, timeout=900, check=False)
        if made.returncode:
            pytest.skip(f"debootstrap cannot fetch Debian here: {made.stdout[-300:]}")
    for name in LENT:
        if Path("/", name).exists():
            shutil.copy(Path("/", name), root / name)
    certificates = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
    if certificates and Path(certificates).is_file():
        shutil.copy(certificates, root / CERTIFICATES)
    return root


@pytest.fixture(scope="session")
def copy_of_bare_root(bare_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], BareSystem]:
    """Makes a bare system for one test module. Skips the test where pip inside cannot reach a package index."""

    def copy() -> BareSystem:
        root = tmp_path_factory.mktemp("system") / "root"
        subprocess.run(["cp", "-a", str(bare_root), str(root)], check=True, timeout=300)
        system = BareSystem(root)
        probe = "python3 -m venv /tmp/probe && /tmp/probe/bin/pip download -q --no-deps -d /tmp/probe idna"
        tried = system.run("sh", "-c", probe, timeout_s=300)
        if tried.returncode:
            pytest.skip(f"pip reaches no package index from a bare system: {tried.stderr.strip().splitlines()[-1:]}")
        shutil.rmtree(root / "tmp/probe")
        return system

    return copy


@pytest.fixture(scope="session")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("built")
    return build("wheel", copy_checkout(scratch / "tree"), scratch)
