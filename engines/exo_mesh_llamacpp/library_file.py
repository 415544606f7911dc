"""Finds the file of the llama.cpp library. Opens and imports nothing, because a node asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path

PACKAGE = "xllamacpp"
"""The wheel whose library this engine uses: it exports llama.cpp's C functions."""

REMEDY = 'pip install "exo-mesh[llamacpp]"'


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """A file that should hold llama.cpp, and what to call it."""

    path: Path
    version: str


@cache
def packaged_library() -> LibraryFile | None:
    """The library of the installed wheel, or None."""
    try:
        spec = util.find_spec(PACKAGE)
        version = metadata.version(PACKAGE)
    except (ImportError, ValueError, metadata.PackageNotFoundError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for pattern in (f"{PACKAGE}*.so", f"{PACKAGE}*.pyd"):
            found = sorted(Path(place).glob(pattern))
            if found:
                return LibraryFile(found[0], f"{PACKAGE} {version}")
    return None


def chosen_library(options: Mapping[str, str]) -> LibraryFile | None:
    """The library that option `library` names, otherwise that of the installed wheel; None if there is none."""
    wanted = options.get("library")
    if wanted:
        return LibraryFile(Path(wanted), Path(wanted).name)
    return packaged_library()
