"""Finds out whether this machine is a board whose NPU runs RKLLM models."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from exo_mesh.engine.rockchip import DEVICE_TREE, NPU_TOPS, chip_of, npu_words

RUNTIME = "librkllmrt.so"
LIBRARY_DIRS = tuple(map(Path, ("/usr/lib", "/usr/local/lib", "/usr/lib/aarch64-linux-gnu", "~/RKLLAMA/lib")))
"""Where Rockchip's packages and RKLLAMA's installer put the runtime library."""


def describe_board(device_tree: Path = Path(DEVICE_TREE), library_dirs: Sequence[Path] = LIBRARY_DIRS) -> str:
    """What was found that RKLLM runs on: the chip by its device tree, or the runtime library; "" for neither.

    Reads one small file and looks for four others.
    """
    chip = ""
    with contextlib.suppress(OSError):
        chip = chip_of((device_tree / "compatible").read_bytes()[:4096])
    if chip in NPU_TOPS:
        return npu_words(chip)
    for folder in library_dirs:
        library = folder.expanduser() / RUNTIME
        if library.is_file():
            return f"RKLLM's runtime library {library}"
    return ""
