"""`python -m tools.dashboards` writes the dashboards; with --check it only compares them with what is checked in."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.dashboards.catalogue import BOARDS
from tools.dashboards.render import to_json

FOLDER = Path(__file__).resolve().parents[2] / "monitoring" / "grafana" / "dashboards"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    check = parser.parse_args().check
    stale = [board.name for board in BOARDS if _differs(FOLDER / f"{board.name}.json", to_json(board))]
    if check:
        if stale:
            print(f"out of date: {', '.join(stale)}; run python -m tools.dashboards", file=sys.stderr)
        return 1 if stale else 0
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(to_json(board), encoding="utf-8")
    print(f"{len(BOARDS)} dashboards in {FOLDER}, {len(stale)} changed")
    return 0


def _differs(path: Path, text: str) -> bool:
    return not path.exists() or path.read_text(encoding="utf-8") != text


if __name__ == "__main__":
    sys.exit(main())
