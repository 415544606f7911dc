"""The first minute of a newcomer: `python -m tools.bench first-minute --wheel WHEEL`.

For each way of installing: megabytes that pip must download, megabytes on disk, and seconds of each step from an empty
folder to the first answer. Seconds of an installation depend on the package index; megabytes do not. uv is used if it
is in the path. Nothing outside a temporary folder is changed, and caches of packages are not used.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from exo_mesh.cli.client.child_node import running_node
from exo_mesh.errors import InputError, MeshError
from tools.bench.sides import own_environ

SCRIPT = Path(__file__).parents[2] / "scripts" / "install.sh"
STEP_S = 1800.0
MODEL = "exo-mesh-demo"
QUESTION = "Count from 7 to 20."
WAYS = ("pip", "script", "lean", "uv")
NOT_LEAN = ("transformers", "sentencepiece")
MB = 1e6


class Steps:
    """The steps of one way, in order: name, seconds, and megabytes where they count."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float | None]] = []

    def time(self, name: str, act: Callable[[], Any]) -> Any:
        """Run a step, and record its time."""
        began = time.monotonic()
        found = act()
        self.rows.append((name, time.monotonic() - began, None))
        return found

    def weigh(self, name: str, size_bytes: int) -> None:
        self.rows.append((name, 0.0, size_bytes / MB))


def environ_of(home: Path) -> dict[str, str]:
    """The environment of a newcomer: a home of its own, no variables of Python and no cache of packages."""
    own = {name: value for name, value in own_environ().items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return own | {"HOME": str(home), "PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def call(environ: dict[str, str], *command: str | Path) -> str:
    """What a command prints. Raises MeshError with its last lines if it fails."""
    done = subprocess.run(
        list(map(str, command)),
        env=environ,
        capture_output=True,
        text=True,
        timeout=STEP_S,
        check=False,
        cwd=environ["HOME"],
    )
    if done.returncode:
        raise MeshError(f"{command[0]} ended with {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
    return done.stdout


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def install(way: str, wheel: Path, extras: str, home: Path, steps: Steps) -> Path:
    """Install in one of WAYS; returns the command `exo-mesh`."""
    environ, wanted = environ_of(home), f"{wheel}[{extras}]"
    if way == "pip":
        environment = home / "venv"
        steps.time("python -m venv", lambda: call(environ, sys.executable, "-m", "venv", environment))
        steps.time("pip install", lambda: call(environ, environment / "bin/pip", "install", "--quiet", wanted))
        return environment / "bin/exo-mesh"
    if way == "uv":
        command = ["uv", "tool", "install", "--quiet", "--python", sys.executable, wanted]
        steps.time("uv tool install", lambda: call(environ, *command))
    else:
        flags = [
            "--from",
            wheel,
            "--extras",
            extras,
            "--python",
            sys.executable,
            *(["--lean"] if way == "lean" else []),
        ]
        steps.time(f"install.sh{' --lean' if way == 'lean' else ''}", lambda: call(environ, "sh", SCRIPT, *flags))
    return home / ".local/bin/exo-mesh"


def first_look(command: Path, home: Path, steps: Steps) -> None:
    """From the installed command to the first answers: the demo, then a node, its page, and a question over HTTP."""
    environ = environ_of(home)
    steps.time("exo-mesh --version", lambda: call(environ, command, "--version"))
    demo = lambda: call(environ, command, "demo", "--once", "--api-port", "0", "--question", QUESTION)  # noqa: E731
    steps.time("exo-mesh demo --once, the first time", demo)
    steps.time("exo-mesh demo --once, again", demo)
    began = time.monotonic()
    python = command.resolve().parent / "python"
    with running_node(home / "node", [], environ, python=python, directory=home, poll_s=0.02) as child:
        steps.rows.append(("exo-mesh, until it is ready", time.monotonic() - began, None))
        asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
        for name in ("the first answer over HTTP", "the second"):
            steps.time(name, lambda: child.api.post("/v1/chat/completions", asked, 60.0))


def measure(way: str, wheel: Path, extras: str) -> Steps:
    """All steps of one way, in a folder that is removed."""
    steps = Steps()
    with tempfile.TemporaryDirectory(prefix="exo-mesh-first-minute-") as folder:
        home = Path(folder)
        command = install(way, wheel, extras, home, steps)
        steps.weigh("on disk", size_of(home))
        first_look(command, home, steps)
    return steps


def downloads(wheel: Path, extras: str) -> dict[str, int]:
    """Bytes of the files that pip downloads for a new environment, by file name; the wheel itself counts."""
    with tempfile.TemporaryDirectory(prefix="exo-mesh-first-minute-") as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--dest",
            f"{folder}/files",
            f"{wheel}[{extras}]",
        ]
        call(environ_of(Path(folder)), *command)
        return {path.name: path.stat().st_size for path in Path(folder, "files").iterdir()}


def lines_of(way: str, steps: Steps) -> Iterator[str]:
    """The table of one way."""
    yield f"\n{way}"
    for name, seconds, megabytes in steps.rows:
        yield f"  {name:38}{f'{megabytes:8.0f} MB' if megabytes is not None else f'{seconds:8.1f} s'}"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("first-minute", help="from nothing to the first answer", description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True, help="a wheel of exo-mesh")
    parser.add_argument("--extras", default="mlx", help="engines to install (mlx)")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def ways_of(names: str) -> Sequence[str]:
    """The ways to measure. Raises InputError."""
    ways = names.split(",")
    if unknown := [one for one in ways if one not in WAYS]:
        raise InputError(f"--ways {names}: {unknown[0]!r} is unknown; choose from {', '.join(WAYS)}")
    if "uv" in ways and shutil.which("uv") is None:
        raise InputError("--ways uv needs uv in the path: pip install uv")
    return ways


def run(args: argparse.Namespace) -> int:
    """Measures and prints the tables."""
    ways, wheel = ways_of(args.ways), args.wheel.resolve()
    if not wheel.is_file():
        raise InputError(f"{wheel}: file not found")
    files = downloads(wheel, args.extras)
    lean = sum(size for name, size in files.items() if not name.startswith(NOT_LEAN))
    found = {way: measure(way, wheel, args.extras) for way in ways}
    if args.json:
        print(json.dumps({"files": files, "ways": {way: steps.rows for way, steps in found.items()}}))
        return 0
    print(f"{os.cpu_count()} cores; extras {args.extras}")
    whole = f"to download: {sum(files.values()) / MB:.0f} MB in {len(files)} files"
    print(f"{whole}; {lean / MB:.0f} MB without {', '.join(NOT_LEAN)}")
    for way, steps in found.items():
        print("\n".join(lines_of(way, steps)))
    return 0
