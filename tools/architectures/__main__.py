"""`python -m tools.architectures [--write PAGE] --all | NAME …`: checks architectures, writes a table.

`--all`: every architecture of the installed mlx-lm, about ten minutes of one core. Exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.architectures.check import Outcome, check
from tools.architectures.configs import architectures
from tools.architectures.table import render, summary, transformers_part
from tools.workers import check_all


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.architectures", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures (model_type)")
    parser.add_argument("--all", action="store_true", help="all that mlx-lm has")
    parser.add_argument("--write", type=Path, help="the page to write; with names, only their rows of it are new")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(argv)
    if options.all == bool(options.names):
        parser.error("give names of architectures, or --all")
    if options.write and options.names and not options.write.is_file():
        parser.error("a page of some architectures only would say that there are no others")
    outcomes = check_all(options.names or architectures(), options.jobs, _report, check, _failed)
    print(summary([outcome.state for outcome in outcomes]))
    if options.write:
        earlier = options.write.read_text(encoding="utf-8") if options.write.is_file() else ""
        earlier = earlier if options.names else transformers_part(earlier)
        options.write.write_text(render(outcomes, earlier), encoding="utf-8")
    return int(any(outcome.state == "failed" for outcome in outcomes))


def _failed(architecture: str, reason: str) -> Outcome:
    return Outcome(architecture, "failed", reason)


def _report(outcome: Outcome) -> None:
    different = "; ".join(f"{split}: {worst:.1e}" for split, worst in outcome.different.items())
    cuts = f"{len(outcome.legal_cuts)}/{max(outcome.layers - 1, 0)} cuts"
    print(outcome.architecture, outcome.state, cuts, *filter(None, (outcome.reason, different)), sep="  ", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
