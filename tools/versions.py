"""Tries the oldest and the newest version of a library: `python -m tools.versions [--write] [LIBRARY[=VERSION] ...]`.

Each version is installed into a fresh virtual environment on top of the environment that runs this tool, so torch and
everything else stay as they are. There the tests run that use most of the library. --write puts the outcome into the
table of docs/reference/dependencies.md. torch itself is not tried: its wheels are large, and one version is pinned.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from exo_mesh.engine.floors import floors_in

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "dependencies.md"
HEADING = "## Versions that were tried"
INSTALL_S = 600.0
TESTS_S = 1800.0

TESTS: dict[str, tuple[str, ...]] = {
    "aiohttp": ("tests/api/test_ops.py", "tests/api/anthropic/test_messages.py", "tests/wire/test_versions.py"),
    "grpcio": ("tests/wire", "tests/rings/hosting"),
    "mlx-lm": (
        "tests/engines/test_mlx_split.py",
        "tests/engines/test_mlx_loading.py",
        "tests/engines/test_mlx_survey.py",
    ),
    "protobuf": ("tests/wire",),
    "transformers": ("tests/engines/test_torch_split.py", "tests/engines/test_torch_loading.py"),
}
"""The tests of each library, of a minute or two."""

UNTRIED = {"torch": "not tried: 2.13.0 is pinned"}


@dataclass(frozen=True, slots=True)
class Trial:
    """A version of a library, and how its tests went: `passes`, or what failed. wanted: as it was asked for."""

    library: str
    wanted: str
    version: str
    outcome: str

    @property
    def is_good(self) -> bool:
        return self.outcome == "passes"


def floors() -> dict[str, str]:
    """The oldest versions that pyproject.toml allows, of the libraries that are tried."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [
        *project["dependencies"],
        *(one for extra in ("mlx", "torch") for one in project["optional-dependencies"][extra]),
    ]
    found = {floor.library: floor.needed for floor in floors_in(named)}
    return {library: found[library] for library in TESTS}


def try_version(library: str, wanted: str) -> Trial:
    """Tries a version in an environment of its own. wanted: a version, or `newest`."""
    with tempfile.TemporaryDirectory(prefix="exo-mesh-versions-") as folder:
        python = _environment(Path(folder))
        asked = library if wanted == "newest" else f"{library}=={wanted}"
        environ = _environ(python)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--upgrade", asked]
        done = subprocess.run(pip, env=environ, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        if done.returncode:
            return Trial(library, wanted, wanted, f"cannot be installed: {_last(done.stderr)}")
        show = [str(python), "-c", f"from importlib.metadata import version; print(version({library!r}))"]
        version = subprocess.run(show, env=environ, capture_output=True, text=True, check=True).stdout.strip()
        pytest = [str(python), "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *TESTS[library]]
        ran = subprocess.run(
            pytest, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=TESTS_S, check=False
        )
        return Trial(library, wanted, version, "passes" if ran.returncode == 0 else f"fails: {_failed(ran.stdout)}")


def table(trials: Sequence[Trial], before: str) -> str:
    """The rows of the page: what was tried now, else as it was."""
    rows = {tuple(row[:2]): row for row in _rows(before)}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for one in trials:
        end = "newest" if one.wanted == "newest" else "oldest"
        rows[one.library, end] = [one.library, end, one.version, one.outcome, today]
    for library, reason in UNTRIED.items():
        rows[library, "newest"] = [library, "newest", "", reason, ""]
    lines = ["| library | end | version | tests | on |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join([f"`{row[0]}`", *row[1:]]) + " |" for _, row in sorted(rows.items())]
    return "\n".join(line.replace("|  |", "| |") for line in lines) + "\n"


def write(trials: Sequence[Trial]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    first = page.index("| library | end |")
    stop = page.find("\n\n", first) + 1 or len(page)
    PAGE.write_text(page[:first] + table(trials, page[first:stop]) + page[stop:], encoding="utf-8")


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 5:
            yield [cells[0].strip("`"), *cells[1:]]


def _environment(folder: Path) -> Path:
    """A virtual environment that also finds what is installed for this Python; its own versions come first."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    own = sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")})
    Path(own, "beneath.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def _environ(python: Path) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return environ | {
        "PATH": f"{python.parent}:{environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'engines'}",
        "EXO_MESH_COLD_TESTS": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("ERROR")] or text.splitlines() or [""]
    return " ".join(lines[0].split())[:200].replace("|", "/")


def _failed(text: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", text, re.M)
    return f"`{found[1]}` {(found[2] or '')[:120]}".strip().replace("|", "/") if found else "the tests did not run"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.versions", description=__doc__)
    parser.add_argument(
        "libraries", nargs="*", metavar="LIBRARY[=VERSION]", help=f"of {', '.join(TESTS)}; default: all"
    )
    parser.add_argument("--write", action="store_true", help="write the outcome into the table of the docs")
    parser.add_argument("--list", action="store_true", help="only print what would be tried")
    options = parser.parse_args(argv)
    asked = [(name, version) for name, _, version in (text.partition("=") for text in options.libraries or TESTS)]
    if unknown := {name for name, _ in asked} - set(TESTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(TESTS)}")
    trials = []
    oldest = floors()
    for name, wanted in ((n, end) for n, version in asked for end in ([version] if version else [oldest[n], "newest"])):
        if options.list:
            print(name, wanted)
            continue
        trials.append(try_version(name, wanted))
        print(trials[-1].library, trials[-1].version, trials[-1].outcome, flush=True)
    if options.write:
        write(trials)
    return int(not all(trial.is_good for trial in trials))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
