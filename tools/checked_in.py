"""Writes or compares files that a program generates and that are checked in for people to read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def keep_up_to_date(
    module: str, description: str | None, folder: Path, files: Mapping[str, str], argv: Sequence[str] | None = None
) -> int:
    """Writes the files that differ, given as text by path below `folder`; with --check only lists them. Returns the
    exit code: 1 if --check has found one."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    check = parser.parse_args(argv).check
    stale = [name for name, text in files.items() if not _is(folder / name, text)]
    where = folder.relative_to(ROOT)
    if check:
        for name in stale:
            print(f"{where / name} is out of date: run python -m {module}", file=sys.stderr)
        return int(bool(stale))
    for name in stale:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(files[name], encoding="utf-8")
        print(f"{where / name} is written")
    return 0


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text
