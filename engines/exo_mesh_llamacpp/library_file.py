"""Finds the file of the llama.cpp library. Opens and imports nothing, because a node asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata, util
from pathlib import Path

import msgspec

from exo_mesh.errors import EngineError

PACKAGE = "xllamacpp"
"""The wheel whose library this engine uses: it exports llama.cpp's C functions."""

FALLBACK = "llama_cpp"
"""The package whose library is used if PACKAGE is not installed: it declares the layout of its library."""

OTHERS = {
    FALLBACK: ("llama-cpp-python", "lib", "llama_cpp.py"),
    "llama_cpp_py_sync": ("llama-cpp-py-sync", ".", ""),
}
"""Other packages that ship a library, which option `library` can name: {module: (distribution, folder of the library,
source that declares its structures)}."""

_FILES = ("libllama.so", "libllama.dylib", "llama.dll")

REMEDY = 'pip install "exo-mesh[llamacpp]"'


class LibraryFile(msgspec.Struct, frozen=True):
    """A file that should hold llama.cpp, and what to call it. structures: the source that declares the structures of
    its functions, if there is one. is_asked: whether a node asks it for its devices, and computes on its GPUs, without
    option `device`; of PACKAGE a node only knows that it has no GPU but Apple's."""

    path: Path
    version: str
    structures: Path | None = None
    is_asked: bool = True


@cache
def packaged_library() -> LibraryFile | None:
    """The library of an installed package, or None."""
    return _of_wheel() or _of_fallback()


def _of_wheel() -> LibraryFile | None:
    try:
        spec = util.find_spec(PACKAGE)
        version = metadata.version(PACKAGE)
    except (ImportError, ValueError, metadata.PackageNotFoundError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for pattern in (f"{PACKAGE}*.so", f"{PACKAGE}*.pyd"):
            found = sorted(Path(place).glob(pattern))
            if found:
                return LibraryFile(found[0], f"{PACKAGE} {version}", is_asked=False)
    return None


def _of_fallback() -> LibraryFile | None:
    try:
        return _of_package(FALLBACK)
    except EngineError:
        return None


def chosen_library(options: Mapping[str, str]) -> LibraryFile | None:
    """The library that option `library` names, a path or a package of OTHERS; otherwise PACKAGE's, or else FALLBACK's.
    None if there is none. Raises EngineError if the named package has none."""
    wanted = options.get("library")
    if wanted in OTHERS:
        return _of_package(wanted)
    if wanted:
        return LibraryFile(Path(wanted), Path(wanted).name)
    return packaged_library()


def _of_package(module: str) -> LibraryFile:
    distribution, folder, source = OTHERS[module]
    try:
        spec = util.find_spec(module)
        version = metadata.version(distribution)
    except (ImportError, ValueError, metadata.PackageNotFoundError) as exc:
        raise EngineError(f"library={module}: {distribution} is not installed") from exc
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for name in _FILES:
            file = Path(place) / folder / name
            if file.is_file():
                return LibraryFile(file, f"{distribution} {version}", Path(place) / source if source else None)
    raise EngineError(f"library={module}: {distribution} {version} has no llama.cpp library")
