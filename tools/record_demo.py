"""Runs `exo-mesh demo --once` and writes what it shows to docs/images/demo.svg, the picture of the README.

The peers, the answer and the speed are those of this machine at this moment: run it while nothing else does.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

from exo_mesh.cli import exit_codes
from exo_mesh.cli.demo_screen import DemoScreen
from exo_mesh.cli.verbs import demo

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "demo.svg"
WIDTH = 80

_WITHOUT_FONTS = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""rich would load a font from another site; the reader's own monospaced font does."""


def recorded(flags: list[str]) -> str:
    """The SVG of a demo. Raises SystemExit if the demo fails."""
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    console = Console(record=True, highlight=False, soft_wrap=True, force_terminal=False, width=WIDTH)
    console.print(Text("$ exo-mesh demo", style="bold"))
    if code := demo.demonstrate(parser.parse_args(["--once", *flags]), DemoScreen(console)):
        sys.exit(code)
    return console.export_svg(title="exo-mesh demo", code_format=_WITHOUT_FONTS, unique_id="demo")


def main() -> int:
    """Record, and write the picture."""
    parser = argparse.ArgumentParser(prog="python -m tools.record_demo", description=__doc__)
    parser.add_argument(
        "--to", type=Path, default=PICTURE, metavar="FILE", help="where to write (docs/images/demo.svg)"
    )
    parser.add_argument("--engine", default="auto", metavar="NAME", help="engine of the peers (the best one here)")
    args = parser.parse_args()
    lines = [line.rstrip() for line in recorded(["--engine", args.engine]).splitlines()]
    args.to.write_text("\n".join(line for line in lines if line) + "\n", encoding="utf-8")
    print(f"{args.to} is written")
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main())
