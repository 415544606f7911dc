"""The stages that wrote the files of a machine: what they computed, as their files say, and how much there is of it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from exo_mesh.domain.shard import MAX_KEYS, KeptLayers
from exo_mesh.rings.prefix_disk import file_format
from exo_mesh.rings.prefix_disk.file_format import StoredPrefixError
from exo_mesh.rings.prefix_disk.folder import DAY_S, StoredFile, stored_files

MOST_FOLDERS = 256
"""Most folders of stages that are looked at: those with the files that were used last."""

MOST_TRIES = 16
"""Most files of a folder that are opened at one look to find a readable one."""

_log = logging.getLogger(__name__)


class KvMaker(msgspec.Struct, frozen=True):
    """A stage, or a rank of one: another one cannot use its files. version: of exo-mesh, the engine's name, and its
    version. size: ranks of the stage, 0 if it is no tensor group."""

    model: str
    model_digest: str
    activation_dtype: str
    start: int
    stop: int
    num_layers: int
    version: tuple[str, str, str]
    options: Mapping[str, str]
    rank: int = 0
    size: int = 0

    @property
    def text(self) -> str:
        """The maker as its files contain it."""
        shard = [self.start, self.stop, self.num_layers, *([self.rank, self.size] if self.size else [])]
        options = sorted(self.options.items())
        return json.dumps([self.model, self.model_digest, self.activation_dtype, shard, self.version, options])

    def kept(self, files: Sequence[StoredFile]) -> KeptLayers:
        """What a machine has on its disk if these are its files of this maker, the last used one first. At least one of
        them has tokens."""
        rounded = 1 << (sum(one.tokens for one in files).bit_length() - 1)
        engine, size = self.version[1], self.size or 1
        keys = tuple(sorted({int(one.key[:16], 16) for one in files[:MAX_KEYS]}))
        return KeptLayers(engine, self.start, self.stop, rounded, self.activation_dtype, self.rank, size, keys)


def maker_from(text: str) -> KvMaker:
    """Parses the text of a maker; raises StoredPrefixError for any other text."""
    try:
        model, digest, activation_dtype, (start, stop, num_layers, *rank), version, options = json.loads(text)
        package, engine, release = map(str, version)
        return KvMaker(
            str(model),
            str(digest),
            str(activation_dtype),
            int(start),
            int(stop),
            int(num_layers),
            (package, engine, release),
            {str(name): str(value) for name, value in options},
            *map(int, rank),
        )
    except (ValueError, TypeError) as exc:
        raise StoredPrefixError("its maker is unknown") from exc


class KeptKv(msgspec.Struct):
    """The KV of all stages below a root. is_usable: whether a stage of today could use the files of a maker. days:
    after which a file that was not used expires. secret: of the files; None in an open mesh."""

    root: Path
    secret: bytes | None
    is_usable: Callable[[KvMaker], bool]
    days: float
    now: Callable[[], float] = time.time
    _state: dict[str, int] | None = None
    """When each folder was changed at the last look."""
    _found: dict[str, list[KeptLayers]] = msgspec.field(default_factory=dict)
    _right_until: float = math.inf
    """When the first of the files expires; the past if a folder could not be read."""
    _makers: dict[str, KvMaker] = msgspec.field(default_factory=dict)
    """The makers that were read, by folder. The name of a folder depends on the maker."""

    def read(self) -> dict[str, list[KeptLayers]]:
        """What there is, by model digest, what was used last first. Blocking. Files are listed only if a folder has
        changed, a file has expired, or a folder could not be read the last time."""
        state = self._look()
        if state != self._state or self.now() >= self._right_until:
            self._state, self._found = state, self._list()
        return {digest: list(kept) for digest, kept in self._found.items()}

    def _look(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for folder in self.root.glob("*/*/*"):  # model, stage, rank
            with contextlib.suppress(OSError):
                found[str(folder)] = folder.stat().st_mtime_ns
        return found

    def _list(self) -> dict[str, list[KeptLayers]]:
        by_folder: dict[str, list[StoredFile]] = {}
        now = self.now()
        self._right_until = math.inf
        for one in sorted(stored_files(self.root), key=lambda one: -one.used_at):
            expires_at = math.inf if one.pinned else one.used_at + self.days * DAY_S
            if now < expires_at:
                by_folder.setdefault(one.stage, []).append(one)
                self._right_until = min(self._right_until, expires_at)
        known, self._makers = self._makers, {}
        found: dict[str, list[KeptLayers]] = {}
        for folder, files in list(by_folder.items())[:MOST_FOLDERS]:
            maker = known.get(folder) or self._maker_of(files)
            if maker is None:
                continue
            self._makers[folder] = maker
            if any(one.tokens for one in files) and self.is_usable(maker):
                found.setdefault(maker.model_digest, []).append(maker.kept(files))
        return found

    def _maker_of(self, files: list[StoredFile]) -> KvMaker | None:
        """The maker that the first readable file names; None if there is none among the last used ones."""
        for one in files[:MOST_TRIES]:
            try:
                with one.path.open("rb") as stream:
                    return maker_from(file_format.read_about(stream, self.secret).maker)
            except StoredPrefixError as exc:
                _log.debug("%s: %s", one.path.name, exc)
            except OSError as exc:
                _log.debug("%s: %s", one.path.name, exc)
                self._right_until = -math.inf  # it may be readable at the next look
        return None
