"""The static files of the page. Their paths contain a hash of all files, so browsers may cache them for ever."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

FOLDER: Final = Path(__file__).parent
PREFIX: Final = "/page"
_BASE_MARK: Final = "{{base}}"
"""The mark in index.html that is replaced by the path of the other files."""
_WORKER: Final = "worker.js"
_FILES_MARK, _VERSION_MARK = '"{{files}}"', "{{version}}"

_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
_COMPRESSED: Final = frozenset({".woff2"})


class Asset(msgspec.Struct, frozen=True):
    """One file, ready to send. gzipped: whether body is compressed with gzip."""

    body: bytes
    content_type: str
    gzipped: bool


class PageAssets:
    """The files below a folder, by their path in it. Each file is read on its first request and then cached."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder

    @cached_property
    def names(self) -> frozenset[str]:
        """The paths of the files that are served; other files of the folder, such as Python files, are not."""
        return frozenset(name for name in self._listed() if PurePosixPath(name).suffix in _TYPES)

    @cached_property
    def version(self) -> str:
        """A hash of the names and contents of all files."""
        digest = hashlib.sha256()
        for name in sorted(self.names):
            content = (self._folder / name).read_bytes()
            digest.update(f"{len(name)} {name} {len(content)} ".encode() + content)
        return digest.hexdigest()[:16]

    @property
    def base(self) -> str:
        """The path of all files but index.html."""
        return f"{PREFIX}/{self.version}"

    @cached_property
    def index(self) -> str:
        """The document that loads all others."""
        return (self._folder / "index.html").read_text("utf-8").replace(_BASE_MARK, self.base)

    @cached_property
    def worker(self) -> str:
        """The service worker, with the paths of the files that it keeps."""
        files = json.dumps([f"{self.base}/{name}" for name in sorted(self.names - {"index.html", _WORKER})])
        text = (self._folder / _WORKER).read_text("utf-8")
        return text.replace(_FILES_MARK, files[1:-1]).replace(_VERSION_MARK, self.version)

    def asset(self, name: str) -> Asset | None:
        """The file with this path, else None. Only listed paths are opened, so no path can leave the folder."""
        return _read(self._folder / name) if name in self.names else None

    def _listed(self) -> Iterator[str]:
        return (path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file())


@cache
def _read(path: Path) -> Asset:
    body = path.read_bytes()
    if path.suffix in _COMPRESSED:
        return Asset(body, _TYPES[path.suffix], gzipped=False)
    return Asset(gzip.compress(body, 9, mtime=0), _TYPES[path.suffix], gzipped=True)
