"""Sets the number of threads of the BLAS library that comes with NumPy's wheels, and changes it with the load."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from exo_mesh.engine.free_cores import FreeCores
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


class BlasThreads:
    """The threads of this process' OpenBLAS: a fixed number, or as many as other programs leave cores free."""

    def __init__(self, wanted: str) -> None:
        """Raises InputError, see set_threads."""
        self._most = set_threads(wanted) or 1
        self._free = FreeCores(self._most) if wanted == "auto" and self._most > 1 else None

    def adapt(self) -> None:
        """Follow the load of the machine. Between two products only; takes less than a microsecond most times."""
        if self._free is not None and self._free.is_due():
            before = self._free.threads
            if self._free.follow() != before:
                set_threads(str(self._free.threads))

    def close(self) -> None:
        """Leave the library as it was."""
        if self._free is not None and self._free.threads != self._most:
            set_threads(str(self._most))


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
