"""Finds the program of a supervised llama-server, and the models that it can load."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from exo_mesh.errors import ModelError

MAX_FILES = 512
MAX_FOLDERS = 4096
DEPTH = 2
"""Folders between a directory of models and a file: of the organisation and of the model."""

_SPLIT = re.compile(r"-(?P<part>\d{5})-of-\d{5}\.gguf\Z", re.IGNORECASE)
"""The end of the name of a model in several files; llama-server is given the first."""

_NO_MODEL = re.compile(r"(\A|[-_.])mmproj|(\A|[-_.])imatrix|\Amtp-", re.IGNORECASE)
"""Files beside a model: the projector of its images, statistics, drafting heads."""


def program_defect(binary: Path) -> str:
    """Why the program cannot be started; "" if it can."""
    if not binary.is_file():
        return f"the llama-server {binary} does not exist"
    if not os.access(binary, os.X_OK):
        return f"the llama-server {binary} is not executable: chmod +x {binary}"
    return ""


def find_gguf_models(places: Sequence[Path]) -> dict[str, Path]:
    """GGUF files by name: files that are named themselves, and files in directories and their folders.

    The name is the path below the directory; of two equal ones the first counts. Blocking. Raises ModelError if none of
    the places exists.
    """
    found: dict[str, Path] = {}
    for place in places:
        files = [(place.name, place)] if place.is_file() else [*_below(place)]
        for name, file in sorted(files):
            found.setdefault(name, file)
    if not found and not any(place.exists() for place in places):
        raise ModelError(f"{', '.join(map(str, places))} cannot be read")
    return dict([*found.items()][:MAX_FILES])


def find_gguf_model(places: Sequence[Path], name: str) -> Path:
    """The file of a model that `find_gguf_models` has named. Raises ModelError for any other name."""
    found = find_gguf_models(places)
    if name not in found:
        where, names = ", ".join(map(str, places)), ", ".join([*found][:10]) or "none"
        raise ModelError(f"{where} has no model {name}; it has: {names}")
    return found[name]


def _below(directory: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of the models in a directory and its folders. What cannot be read is left out."""
    for number, (folder, folders, names) in enumerate(os.walk(directory)):
        depth = len(Path(folder).relative_to(directory).parts)
        folders[:] = [] if depth == DEPTH or number >= MAX_FOLDERS else sorted(folders)
        for name in names:
            path = Path(folder, name)
            if _is_model(path):
                yield str(path.relative_to(directory)), path


def _is_model(path: Path) -> bool:
    if path.suffix.lower() != ".gguf" or _NO_MODEL.search(path.name) or not path.is_file():
        return False
    split = _SPLIT.search(path.name)
    return split is None or int(split["part"]) == 1
