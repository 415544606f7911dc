"""Reads files from a Hugging Face cache on this machine, so that they are not downloaded again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from exo_mesh.errors import FetchError
from exo_mesh.models.fetcher.source import Sink
from exo_mesh.models.file_server.listing import FileInfo, Listing

_BLOCK_BYTES = 2**20


class CacheFiles:
    """The files of one commit that the cache has with the expected size."""

    peer = "cache"

    def __init__(self, repo: str, commit: str, sizes: Mapping[str, int]) -> None:
        self._listing = Listing(repo, commit, {})
        self._paths: dict[str, Path] = {}
        for name, size in sizes.items():
            path = _cached(repo, name, commit)
            if path is not None and path.stat().st_size == size:
                self._paths[name] = path
                self._listing.files[name] = FileInfo(size)

    def listing(self) -> Listing:
        return self._listing

    def has(self, name: str) -> bool:
        return name in self._paths

    def read(self, file: str, start: int, stop: int, sink: Sink) -> None:
        if file not in self._paths:
            raise FetchError(f"the cache has no {file}")
        try:
            with self._paths[file].open("rb", buffering=0) as stream:
                stream.seek(start)
                while start < stop and (block := stream.read(min(_BLOCK_BYTES, stop - start))):
                    sink(memoryview(block))
                    start += len(block)
        except OSError as exc:
            raise FetchError(f"{file} in the cache cannot be read: {exc.strerror}", is_final=True) from exc
        if start < stop:
            raise FetchError(f"{file} in the cache is too short", is_final=True)

    def close(self) -> None:
        """Does nothing: no file stays open."""


def _cached(repo: str, name: str, commit: str) -> Path | None:
    try:
        found = try_to_load_from_cache(repo, name, revision=commit)
    except (HFValidationError, ValueError, OSError):
        return None
    return Path(found) if isinstance(found, str) else None
