"""`python -m tools.architectures ENGINE [--few] [--write] --all | NAME…`: checks architectures of an engine's library.

ENGINE: mlx (mlx-lm), torch (transformers) or llamacpp. Every legal cut in two and some in three, against the library
alone, each in another process; --few tries three splits. --write puts the rows of what was checked into the engine's
page of docs/reference. Exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys

from tools.architectures.check import adapter_of, check_apart
from tools.architectures.outcome import Outcome
from tools.architectures.pages import PAGES
from tools.architectures.table import summary


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.architectures", description=__doc__)
    parser.add_argument("engine", choices=PAGES)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="all that the library has")
    parser.add_argument("--few", action="store_true", help="three splits of each")
    parser.add_argument("--write", action="store_true", help="write the rows into the page")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_intermixed_args(argv)
    adapter = adapter_of(options.engine)
    if options.all == bool(options.names):
        parser.error("give names of architectures, or --all")
    if unknown := set(options.names) - set(adapter.names()):
        parser.error(f"the library has no {', '.join(sorted(unknown))}")
    outcomes = check_apart(
        options.engine, options.names or adapter.names(), _report, few=options.few, jobs=options.jobs
    )
    print(summary(outcome.state for outcome in outcomes))
    if options.write:
        PAGES[options.engine].write(outcomes, few=options.few)
    return int(any(outcome.state == "failed" for outcome in outcomes))


def _report(outcome: Outcome) -> None:
    cuts = f"{len(outcome.cuts)}/{max(outcome.layers - 1, 0)} cuts"
    traits = " ".join(f"{name}={value}" for name, value in outcome.traits.items())
    print(outcome.name, outcome.state, cuts, *filter(None, (traits, outcome.reason)), sep="  ", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
