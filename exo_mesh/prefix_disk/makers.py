"""The stages that wrote the files of a machine: what they computed, as their files say, and how much there is of it."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from exo_mesh.domain.shard import KeptLayers
from exo_mesh.prefix_disk import file_format
from exo_mesh.prefix_disk.file_format import StoredPrefixError
from exo_mesh.prefix_disk.folder import DAY_S, StoredFile, stored_files

MOST_FOLDERS = 256
"""Most folders of stages that are looked at: those with the files that were used last."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvMaker:
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

    def kept(self, tokens: int) -> KeptLayers:
        """What a machine has on its disk if its files of this maker hold so many tokens; see KeptLayers.tokens."""
        rounded = 1 << (tokens.bit_length() - 1)
        engine, size = self.version[1], self.size or 1
        return KeptLayers(engine, self.start, self.stop, rounded, self.activation_dtype, self.rank, size)


def maker_from(text: str) -> KvMaker:
    """Raises StoredPrefixError if the text is that of no maker."""
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


@dataclass(slots=True)
class KeptKv:
    """The KV of all stages below a root. is_usable: whether a stage of today could use the files of a maker. days:
    after which a file that was not used expires. secret: of the files; None in an open mesh."""

    root: Path
    secret: bytes | None
    is_usable: Callable[[KvMaker], bool]
    days: float
    now: Callable[[], float] = time.time
    _state: dict[str, int] | None = None
    """When each folder was changed at the last look."""
    _found: dict[str, list[KeptLayers]] = field(default_factory=dict)
    _makers: dict[str, KvMaker | None] = field(default_factory=dict)
    """By folder; None for files that cannot be used. The name of a folder depends on the maker."""

    def read(self) -> dict[str, list[KeptLayers]]:
        """What there is, by model digest, what was used last first. Blocking. Files are listed only if a folder has
        changed."""
        state = self._look()
        if state != self._state:
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
        oldest_s = self.now() - self.days * DAY_S
        for one in sorted(stored_files(self.root), key=lambda one: -one.used_at):
            if one.pinned or one.used_at >= oldest_s:
                by_folder.setdefault(one.stage, []).append(one)
        known, self._makers = self._makers, {}
        found: dict[str, list[KeptLayers]] = {}
        for folder, files in list(by_folder.items())[:MOST_FOLDERS]:
            maker = known[folder] if folder in known else self._maker_of(files)
            self._makers[folder] = maker
            if maker is not None and (tokens := sum(one.tokens for one in files)):
                found.setdefault(maker.model_digest, []).append(maker.kept(tokens))
        return found

    def _maker_of(self, files: list[StoredFile]) -> KvMaker | None:
        """The maker that the first readable file names, if its files can be used."""
        for maker in self._named_in(files):
            return maker if self.is_usable(maker) else None
        return None

    def _named_in(self, files: list[StoredFile]) -> Iterator[KvMaker]:
        for one in files:
            try:
                with one.path.open("rb") as stream:
                    yield maker_from(file_format.read_about(stream, self.secret).maker)
            except (OSError, StoredPrefixError) as exc:
                _log.debug("%s: %s", one.path.name, exc)
