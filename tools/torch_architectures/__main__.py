"""`python -m tools.torch_architectures [--quick] [--write] --all | FAMILY…`: checks families of transformers.

A FAMILY: every legal cut in two and in three, prefill in two chunks and six decode steps, float32, against the model of
transformers; then three rows of different lengths that decode together. --quick tries three splits. --all tries three
splits of every causal language model of the installed transformers, about half an hour of one core. --write puts the
lines of the families that were checked into docs/reference/architectures.md. Exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from tools.torch_architectures.configs import causal_families
from tools.torch_architectures.judge import Judgement, failed, judge
from tools.torch_architectures.table import line, write
from tools.workers import check_all


def main(argv: list[str]) -> int:
    """Returns 0 if no family failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.torch_architectures", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--all", action="store_true", help="every causal family of the installed transformers")
    parser.add_argument("--quick", action="store_true", help="three splits of each")
    parser.add_argument("--write", action="store_true", help="write the lines into docs/reference/architectures.md")
    options = parser.parse_args(argv)
    if options.all == bool(options.families):
        parser.error("give names of families, or --all")
    if unknown := set(options.families) - set(causal_families()):
        parser.error(f"transformers has no causal language model for {', '.join(sorted(unknown))}")
    check = partial(judge, quick=options.quick or options.all)
    report = partial(_report, save=options.write)
    judgements = check_all(options.families or causal_families(), 1, report, check, failed)
    return int(any(judgement.state == "failed" for judgement in judgements))


def _report(judgement: Judgement, *, save: bool) -> None:
    print(line(judgement), flush=True)
    if save:
        write([judgement])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
