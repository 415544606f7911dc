"""Sets the number of threads of the BLAS library that comes with NumPy's wheels, and changes it with the load."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from exo_mesh.engine.free_cores import ThreadsByLoad
from exo_mesh.errors import InputError

MAX_THREADS = 1024

_FOLDERS = ("../numpy.libs", ".libs", ".dylibs")
"""Folders of a wheel's own libraries, beside or in the package: on Linux, Windows and macOS."""

_NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")


def check_threads(wanted: str) -> None:
    """Raises InputError unless `wanted` is auto or a number of threads."""
    if wanted == "auto":
        return
    if not wanted.isascii() or not wanted.isdecimal() or not 1 <= int(wanted) <= MAX_THREADS:
        raise InputError(f"threads={wanted} is not auto or a number from 1 to {MAX_THREADS}", param="threads")


def set_threads(wanted: str) -> int | None:
    """Set the threads of this process' OpenBLAS, if `wanted` is a number, and return how many it has; None if NumPy has
    another library and `wanted` is auto. Raises InputError if the number cannot be set, or is none."""
    check_threads(wanted)
    library = _openblas()
    if wanted != "auto":
        if library is None:
            raise InputError(
                f"threads={wanted}: the BLAS library of this NumPy is not OpenBLAS; its threads cannot be set here",
                param="threads",
            )
        library[1](int(wanted))
    return None if library is None else int(library[0]())


def threads_by_load(wanted: str) -> ThreadsByLoad | None:
    """Set the threads of this process' OpenBLAS, and return what lets them follow the load; None for a number that was
    chosen, or for another library. Raises InputError, see set_threads."""
    count = set_threads(wanted)
    if wanted != "auto" or count is None:
        return None
    return ThreadsByLoad(count, lambda number: set_threads(str(number)))


@cache
def _openblas() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer] | None:
    """The functions that get and set the number of threads."""
    root = Path(np.__file__).parent
    for file in sorted(found for folder in _FOLDERS for found in (root / folder).glob("*openblas*")):
        try:
            library = ctypes.CDLL(str(file))
        except OSError:
            continue
        for name in _NAMES:
            if hasattr(library, name.format("set")) and hasattr(library, name.format("get")):
                return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None
