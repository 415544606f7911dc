"""`python -m tools.torch_architectures [--quick] [--write] [FAMILY…]`: check families, write the engine's README.

Every legal cut in two and in three, prefill in two chunks and six decode steps, float32, against transformers' own
model; then three rows of different lengths that decode together. Without names all families are checked, which takes
the better part of an hour; --quick tries three splits of each. With --write, only the lines of families that were
checked are new. Exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers.utils import logging

from exo_mesh.errors import MeshError
from tools.torch_architectures.check import TOLERANCE, Outcome, check_family
from tools.torch_architectures.families import FAMILIES, NUM_LAYERS

README = Path(__file__).resolve().parents[2] / "engines" / "exo_mesh_torch" / "README.md"
BEGIN, END = "<!-- families: written by python -m tools.torch_architectures --write -->", "<!-- end -->"
HEAD = "| family | cuts | splits tried | worst difference | rows together | KV | rollback |\n" + "|---" * 7 + "|\n"


def line(family: str, outcome: Outcome) -> str:
    cuts = "all" if len(outcome.cuts) == NUM_LAYERS - 1 else ", ".join(map(str, outcome.cuts)) or "none"
    worst, rows = (f"{value:.1e}" if value else "0" for value in (outcome.worst, outcome.rows))
    kinds = ", ".join(outcome.kv)
    return f"| {family} | {cuts} | {outcome.splits} | {worst} | {rows} | {kinds} | {outcome.rollback} |"


def write(lines: dict[str, str]) -> None:
    """Put lines, by family, into the README's table."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN + "\n")
    old, after = rest.split(END)
    known = {row.split("|")[1].strip(): row for row in old.splitlines() if row.startswith("| ")}
    known.pop("family", None)
    known |= lines
    table = HEAD + "".join(known[name] + "\n" for name in sorted(known))
    README.write_text(f"{before}{BEGIN}\n{table}{END}{after}", encoding="utf-8")


def main(argv: list[str]) -> int:
    """0 if every family that was checked is as exact as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tools.torch_architectures", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all that are known if none is given")
    parser.add_argument("--quick", action="store_true", help="three splits of each")
    parser.add_argument("--write", action="store_true", help="write the lines into the engine's README as they come")
    options = parser.parse_args(argv)
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"no config here for {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    failed = 0
    for family in options.families or list(FAMILIES):
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            try:
                outcome = check_family(Path(directory), family, quick=options.quick)
            except (MeshError, AssertionError, RuntimeError) as exc:
                print(f"{family}: {exc}", flush=True)
                failed += 1
                continue
        failed += outcome.worst > TOLERANCE or outcome.rows > TOLERANCE
        print(line(family, outcome), f"{time.monotonic() - start:.0f} s", flush=True)
        if options.write:
            write({family: line(family, outcome)})
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
