"""`python -m tools.architectures.canaries`: writes the tiny models that the llama.cpp engine ships.

The engine tries an architecture with them before it first uses it. Exit status 1 if an architecture has none.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from exo_mesh_llamacpp.canary_models import MODELS, packed
from exo_mesh_llamacpp.gguf_rules import RULES
from exo_mesh_llamacpp.library import open_library
from exo_mesh_llamacpp.library_file import packaged_library

from tools.architectures.llamacpp_configs import ON_DEMAND, metadata_of
from tools.architectures.llamacpp_shapes import ask_shapes, write_model

DEADLINE_S = 60


def tiny(arch: str, *, experts: bool) -> str:
    """The model of an architecture as JSON, in this process, which a failed assertion of the library ends."""
    library = open_library(packaged_library())
    asked = ask_shapes(library, metadata_of(arch, experts), ON_DEMAND)
    with tempfile.TemporaryDirectory() as scratch:
        shapes = write_model(library, asked, Path(scratch))
    return json.dumps(packed(arch, asked.metadata, shapes))


def write_canaries() -> list[str]:
    """Write the models of all architectures of the engine; returns those that no model was found for."""
    found, absent = {}, []
    for arch in sorted(RULES):
        text = _child(arch, []) or _child(arch, ["experts"])
        if text:
            found[arch] = text
        else:
            absent.append(arch)
    lines = ",\n".join(f"{json.dumps(arch)}: {text}" for arch, text in found.items())
    MODELS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    return absent


def _child(arch: str, flags: list[str]) -> str:
    command = [sys.executable, "-m", "tools.architectures.canaries", arch, *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return lines[-1] if lines and not done.returncode else ""


def main(argv: list[str]) -> int:
    if argv:
        print(tiny(argv[0], experts="experts" in argv))
        return 0
    absent = write_canaries()
    print(f"no tiny model of: {', '.join(absent)}" if absent else "every architecture has a tiny model")
    return bool(absent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
