"""The oldest versions of Python, macOS and libraries that this version of exo-mesh works with.

The versions of libraries come from the requirements of the installed package, so that only pyproject.toml lists them.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import metadata

import msgspec

PACKAGE = "exo-mesh"
MACOS_FLOOR = "14.0"
"""The oldest macOS for which MLX has been built since its version 0.30."""
GLIBC_FLOOR = "2.35"
"""The oldest glibc that MLX's wheels for Linux run on (their tag is manylinux_2_35)."""
MLX_MACHINES = {"linux": ("x86_64", "aarch64"), "darwin": ("arm64",)}
"""The machines for which MLX has wheels."""

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?[^;]*?>=\s*([0-9][0-9.]*)[^;]*(;.*)?")
_VERSION = re.compile(r"^Version: *(\S+) *$", re.MULTILINE)


class Floor(msgspec.Struct, frozen=True):
    """A library and the oldest version that works. extra: the extra that requires the library, "" for the node
    itself."""

    library: str
    needed: str
    extra: str = ""


def is_older(version: str, needed: str) -> bool:
    """Whether a version is below another; a suffix after the numbers, such as rc1, does not count."""
    return _numbers(version) < _numbers(needed)


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:  # 14 and 14.0 are one version
        numbers.pop()
    return tuple(numbers)


def floors_in(requirements: Iterable[str]) -> list[Floor]:
    """The oldest versions in a package's requirements, as `importlib.metadata` lists them."""
    found = {}
    for text in requirements:
        if match := _REQUIREMENT.fullmatch(text.strip()):
            extra = re.search(r"extra == ['\"]([^'\"]+)", match[3] or "")
            floor = Floor(match[1].lower(), match[2], extra[1] if extra else "")
            found[floor.library, floor.extra] = floor
    return list(found.values())


@cache
def own_floors() -> tuple[Floor, ...]:
    """The oldest versions for the installed package; none if it is not installed."""
    try:
        return tuple(floors_in(metadata.requires(PACKAGE) or ()))
    except metadata.PackageNotFoundError:
        return ()


def installed(library: str) -> str:
    """The installed version of a library; "" if there is none."""
    try:
        found = metadata.distribution(library)
    except metadata.PackageNotFoundError:
        return ""
    # found.version parses the whole file with the e-mail parser, and a start asks for 20 libraries
    line = _VERSION.search((found.read_text("METADATA") or "").partition("\n\n")[0])
    return line[1] if line else found.version


def too_old(
    extra: str = "", floors: Iterable[Floor] | None = None, version_of: Callable[[str], str] = installed
) -> str:
    """A sentence about too old libraries of an extra (by default the node's); "" if there are none.

    A missing library is not named: the code that needs it reports it.
    """
    old: Mapping[str, str] = {
        floor.library: f"{floor.library} {version} is too old, {floor.needed} or newer is needed"
        for floor in (own_floors() if floors is None else floors)
        if floor.extra == extra and (version := version_of(floor.library)) and is_older(version, floor.needed)
    }
    return "; ".join(old.values())


def mlx_obstacle(system: str, machine: str, libc: tuple[str, str], macos: str) -> str:
    """A sentence on why MLX has no wheel for a machine; "" if it has one.

    system: as sys.platform. libc: name and version, as platform.libc_ver. macos: "" on other systems.
    """
    where = ""
    if machine not in MLX_MACHINES.get(system, ()):
        where = f"{'macOS' if system == 'darwin' else system} on {machine}"
    elif system == "linux" and libc[0] != "glibc":
        where = f"Linux with {' '.join(libc).strip() or 'a C library other than glibc'}"
    elif system == "linux" and is_older(libc[1], GLIBC_FLOOR):
        where = f"glibc {libc[1]} (it needs {GLIBC_FLOOR} or newer)"
    elif system == "darwin" and macos and is_older(macos, MACOS_FLOOR):
        where = f"macOS {macos} (it needs {MACOS_FLOOR} or newer)"
    return f"MLX has no wheel for {where}" if where else ""


@cache
def mlx_obstacle_here() -> str:
    """As mlx_obstacle, for this machine."""
    return mlx_obstacle(sys.platform, platform.machine(), platform.libc_ver(), platform.mac_ver()[0])


OTHER_ENGINES = f'the engine numpy runs without it; pip install "{PACKAGE}[torch]" is faster, where PyTorch has a wheel'
"""Remedy where MLX has no wheel."""


def upgrade(extra: str = "") -> str:
    """The command that upgrades libraries which are too old."""
    return f'pip install --upgrade "{PACKAGE}[{extra}]"' if extra else f"pip install --upgrade {PACKAGE}"
