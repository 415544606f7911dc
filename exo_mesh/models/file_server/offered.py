"""The files of models that a node offers to its peers, and the bytes of them that are present."""

from __future__ import annotations

import os
import re
import threading
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from exo_mesh.domain.spans import Digests, Spans
from exo_mesh.errors import ModelError
from exo_mesh.models.file_server.listing import FileInfo, Listing
from exo_mesh.weights.fetched import MANIFEST_FILE, Manifest, read_manifest
from exo_mesh.weights.model_files import FOLDER_FILES, HUB_DIR, label, open_model_file, place_of
from exo_mesh.weights.names import (
    CODE_SUFFIX,
    FILE_NAME,
    WEIGHT_SUFFIXES,
    is_text_file,
    suffix_of,
)
from exo_mesh.weights.safetensors import on_disk

Models = Callable[[str], tuple[Path, str] | None]
"""Returns (directory, card digest) of a model by its name; None if there is none. Called from several threads."""

MAX_FILES = 10_000
_MAX_KEPT = 64

_SHA256 = re.compile(r"[0-9a-f]{64}")


class OfferedFile(msgspec.Struct, frozen=True):
    """A file on offer. path: with the file's final name, although it may still be stored as a part."""

    path: Path
    size: int
    sha256: str
    present: Spans
    pieces: Digests = ()

    def available(self, start: int, stop: int) -> tuple[int, int] | None:
        """Returns as much of `[start, stop)` as is present without a gap; None if the first byte is not."""
        index = bisect_right(self.present, start, key=lambda span: span[0]) - 1
        if index < 0 or self.present[index][1] <= start:
            return None
        return start, min(stop, self.present[index][1])

    def open(self) -> BinaryIO:
        """Opens the file. Raises OSError and ModelError."""
        try:
            return open_model_file(on_disk(self.path))
        except FileNotFoundError:
            return open_model_file(on_disk(self.path))  # it was completed, and renamed, in between


class OfferedModel(msgspec.Struct, frozen=True):
    """The state of a model's directory at one moment. manifest: None if all files are complete."""

    model_dir: Path
    digest: str
    manifest: Manifest | None

    @property
    def present_bytes(self) -> int:
        return self.manifest.present_bytes if self.manifest else 0

    def file(self, name: str) -> OfferedFile | None:
        """Returns a file of the model; None for everything else."""
        path = self.model_dir / name
        if not FILE_NAME.fullmatch(name):
            return None
        if self.manifest and name in self.manifest.files:
            fetched = self.manifest.files[name]
            return OfferedFile(path, fetched.size, fetched.sha256, tuple(fetched.present), fetched.pieces)
        suffix = suffix_of(name)
        if name in FOLDER_FILES.values():
            return _whole(place_of(self.model_dir, name))
        if is_text_file(name) or suffix == CODE_SUFFIX or (suffix in WEIGHT_SUFFIXES and not self.manifest):
            return _whole(path)
        return None

    def listing(self) -> Listing:
        """Lists all files that can be opened."""
        names = set(self.manifest.files) if self.manifest else set()
        with os.scandir(self.model_dir) as entries:
            for entry in entries:
                names.add(entry.name)
                if len(names) > MAX_FILES:
                    break
        names.update(FOLDER_FILES.values())
        found = {name: file for name in sorted(names) if (file := self.file(name))}
        made = tuple(self.manifest.made) if self.manifest else ()
        git_ids = self.manifest.git_ids if self.manifest else {}
        listed = {
            name: FileInfo(file.size, file.sha256, "" if name in made else git_ids.get(name, ""), file.pieces)
            for name, file in found.items()
        }
        repo, revision = self._origin()
        return Listing(repo, revision, listed, self.digest, made)

    def _origin(self) -> tuple[str, str]:
        """Returns (repo, revision), from the manifest or from the place in a Hugging Face cache."""
        if self.manifest:
            return self.manifest.repo, self.manifest.revision
        snapshots = self.model_dir.parent
        if snapshots.name == "snapshots" and HUB_DIR.fullmatch(snapshots.parent.name):
            return label(self.model_dir), self.model_dir.name
        return "", ""


class OfferedModels:
    """Looks models up by name. A manifest is read again only when it was replaced. Thread-safe."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._lock = threading.Lock()
        self._kept: dict[Path, tuple[object, Manifest | None]] = {}

    def find(self, name: str) -> OfferedModel | None:
        """Returns the model; None if there is no such model, or its manifest cannot be used."""
        found = self._models(name)
        if found is None:
            return None
        model_dir, digest = found
        try:
            return OfferedModel(model_dir, digest, self._manifest(model_dir))
        except (ModelError, OSError):
            return None

    def _manifest(self, model_dir: Path) -> Manifest | None:
        try:
            stat = os.stat(model_dir / MANIFEST_FILE)
        except FileNotFoundError:
            return None
        stamp = stat.st_ino, stat.st_size, stat.st_mtime_ns
        with self._lock:
            kept = self._kept.pop(model_dir, None)
            if kept is None or kept[0] != stamp:
                kept = stamp, read_manifest(model_dir)
            self._kept[model_dir] = kept
            if len(self._kept) > _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            return kept[1]


def _whole(path: Path) -> OfferedFile | None:
    try:
        with open_model_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
    except (ModelError, OSError):
        return None
    return OfferedFile(path, size, _sha256_of(path), ((0, size),) if size else ())


def _sha256_of(path: Path) -> str:
    """Returns the SHA-256 by which a Hugging Face cache names large files; "" elsewhere."""
    real = os.path.realpath(path)
    is_blob = os.path.basename(os.path.dirname(real)) == "blobs"
    return os.path.basename(real) if is_blob and _SHA256.fullmatch(os.path.basename(real)) else ""
