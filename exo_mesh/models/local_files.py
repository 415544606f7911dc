"""The model files on this machine: which bytes are present, what stages need, what may be deleted. All calls block."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from exo_mesh.base.printable import quoted
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.model_settings import text_config
from exo_mesh.domain.spans import Pieces, Spans, merged, minus, num_bytes
from exo_mesh.errors import FetchError, ModelError, UnknownModelError
from exo_mesh.machine.disk import Disk
from exo_mesh.weights.fetched import (
    MANIFEST_FILE,
    SCRATCH_PREFIX,
    FetchedFile,
    LayerPieces,
    Manifest,
    read_manifest,
    with_remedy,
)
from exo_mesh.weights.model_files import read_json
from exo_mesh.weights.names import is_model_name
from exo_mesh.weights.tensors import read_stage_tensors, read_tensor_table

USE_FILE = "exo-mesh.used"
"""A file in the directory of a fetched model; its time is the last use of the model."""

GONE_PREFIX = f"{SCRATCH_PREFIX}gone-"

Layers = tuple[int, int] | None
"""Half-open layer range; None: all files, whatever the engines need."""

Wants = Mapping[str, Layers]
"""The layers that each peer must have, by peer id."""

MAX_HOLDINGS = 256
"""Most models outside the fetched ones whose file lists are cached; beyond that the oldest are dropped."""

MAX_PULLS = 16
"""Most unfinished pulls of one model that are stored; beyond that the oldest are dropped."""


class _Use(msgspec.Struct, frozen=True):
    """The use record of a model. is_pinned: the model was pulled by its name. store: id of the peer from whose store it
    is staged. pulls: the layers of unfinished pulls."""

    is_pinned: bool = False
    store: str = ""
    pulls: tuple[Layers, ...] = ()


class Holding(msgspec.Struct, frozen=True):
    """The checkpoint files of a model that a machine has.

    repo, revision: their origin on the hub, "" if only the mesh has them.
    """

    digest: str
    repo: str = ""
    revision: str = ""
    files: Mapping[str, FetchedFile] = msgspec.field(default_factory=dict)

    @property
    def present(self) -> Pieces:
        return {name: tuple(file.present) for name, file in self.files.items()}

    def same_files(self, other: Holding) -> Pieces:
        """Returns what `other` has of equal files: with equal name, size and, where both know it, digest."""
        return {
            name: tuple(theirs.present)
            for name, theirs in other.files.items()
            if (ours := self.files.get(name)) is not None
            and ours.size == theirs.size
            and (not ours.sha256 or not theirs.sha256 or ours.sha256 == theirs.sha256)
        }


class FetchedModel(msgspec.Struct, frozen=True):
    """A fetched model. num_bytes: its size on disk. used_at: Unix seconds. store: id of the peer from whose model store
    it is staged; "" if it is not a staged copy."""

    name: str
    model_dir: Path
    num_bytes: int
    is_whole: bool
    is_pinned: bool
    used_at: float
    store: str = ""


class LocalFiles:
    """Manages the model files below `root`, the directory of fetched models. is_store: other models there belong to the
    model store and may be deleted too. card, find: of any model on this machine, see Catalogue."""

    def __init__(
        self,
        root: Path,
        card: Callable[[str], ModelCard],
        find: Callable[[str], Path],
        disk: Disk,
        *,
        is_store: bool = False,
    ) -> None:
        self.root = root
        self._is_store = is_store
        self._card = card
        self._find = find
        self._disk = disk
        self._holdings: dict[Path, tuple[int, Holding]] = {}
        self._turn = threading.Lock()
        self._using = threading.Lock()

    def target(self, name: str) -> Path:
        """Returns the directory for a model of this name. Raises FetchError if the name is not a model name."""
        if not is_model_name(name):
            raise FetchError(f"{quoted(name, 80)} is not the name of a model that can be fetched", is_final=True)
        return self.root / name

    def model_dir(self, name: str) -> Path:
        """Returns the directory of a model, even of an unusable one. Raises UnknownModelError or ModelError."""
        if is_model_name(name) and (self.root / name / MANIFEST_FILE).exists():
            return self.root / name
        return self._find(name)

    def holding(self, name: str) -> Holding:
        """Returns the files that this machine has of a model. Raises UnknownModelError or ModelError."""
        model_dir, digest = self.model_dir(name), ""
        manifest = _manifest_of(name, model_dir)
        try:
            digest = self._card(name).digest
        except (UnknownModelError, ModelError):
            if manifest is None:
                raise
        if manifest is None:
            return self._holding_of_whole(model_dir, digest)
        return Holding(digest, manifest.repo, manifest.revision, manifest.files)

    def _holding_of_whole(self, model_dir: Path, digest: str) -> Holding:
        changed_ns = model_dir.stat().st_mtime_ns
        with self._turn:
            known = self._holdings.get(model_dir)
            if known is None or known[0] != changed_ns or known[1].digest != digest:
                names = {info.file.name for info in read_tensor_table(model_dir).values()}
                sizes = {name: (model_dir / name).stat().st_size for name in names}
                files = {name: FetchedFile(size, present=[(0, size)]) for name, size in sizes.items()}
                for gone in [one for one in self._holdings if not one.is_dir()]:
                    del self._holdings[gone]
                while len(self._holdings) >= MAX_HOLDINGS:
                    del self._holdings[next(iter(self._holdings))]
                known = self._holdings[model_dir] = changed_ns, Holding(digest, files=files)
            return known[1]

    def pieces(self, name: str, layers: Layers) -> Pieces:
        """Returns the bytes that a stage of these layers needs. Raises UnknownModelError or ModelError."""
        if layers is None:
            return {file: ((0, one.size),) for file, one in self.holding(name).files.items()}
        return self._layer_pieces(name).of(*layers)

    def _layer_pieces(self, name: str) -> LayerPieces:
        model_dir, card = self.model_dir(name), self._card(name)
        tied = text_config(read_json(model_dir / "config.json")).get("tie_word_embeddings")
        table = read_stage_tensors(model_dir)
        known = tied if isinstance(tied, bool) else None
        return LayerPieces(table, card.num_layers, tied=known)

    def missing(self, name: str, layers: Layers) -> Pieces:
        """Returns the bytes that a stage of these layers needs and that are missing. Raises as `pieces`."""
        manifest = _manifest_of(name, self.model_dir(name))
        if manifest is None or manifest.is_whole:
            return {}
        wanted = self.pieces(name, layers)
        missing = {file: minus(merged(spans), _present(manifest, file)) for file, spans in wanted.items()}
        return {file: spans for file, spans in missing.items() if spans}

    def unverified(self, name: str, layers: Layers) -> dict[str, bool]:
        """Returns the fetched files of these layers with unchecked bytes, and whether their digests are known. Raises
        as `pieces`."""
        model_dir = self.model_dir(name)
        manifest = _manifest_of(name, model_dir)
        if manifest is None:
            return {}
        found = {file: manifest.files[file] for file in self.pieces(name, layers) if file in manifest.files}
        return {file: bool(one.sha256) for file, one in found.items() if one.is_unverified_in(model_dir, file)}

    def whole_layers(self, name: str) -> list[range]:
        """Returns the ranges of layers that a stage could load here although the model has not all files; none if it
        has. Raises as `pieces`."""
        model_dir = self.model_dir(name)
        manifest = _manifest_of(name, model_dir)
        if manifest is None or manifest.is_whole:
            return []
        return self._layer_pieces(name).ranges_here(manifest)

    # use and deletion

    def touch(self, name: str, *, is_pinned: bool = False, store: str = "") -> None:
        """Records that a model was used just now, or pulled by its name, or staged."""
        self._change_use(
            name, lambda before: replace(before, is_pinned=is_pinned or before.is_pinned, store=store or before.store)
        )

    def note_pull(self, name: str, layers: Layers) -> None:
        """Records a pull of these layers by the model's name, until `forget_pulls`."""

        def note(before: _Use) -> _Use:
            pulls = (*(one for one in before.pulls if one != layers), layers)
            return replace(before, is_pinned=True, pulls=pulls[-MAX_PULLS:])

        self._change_use(name, note)

    def forget_pulls(self, name: str, *ended: Layers) -> None:
        """Removes the records of ended pulls of these layers; without layers, of all pulls of the model."""

        def forget(before: _Use) -> _Use:
            return replace(before, pulls=tuple(one for one in before.pulls if ended and one not in ended))

        self._change_use(name, forget)

    def unfinished_pulls(self) -> list[tuple[str, Layers]]:
        """Returns (model, layers) of the pulls that have not ended, earlier processes included."""
        return [(one.name, layers) for one in self.fetched() for layers in _read_use(one.model_dir).pulls]

    def _change_use(self, name: str, change: Callable[[_Use], _Use]) -> None:
        """Changes the use record and its time. Only fetched models have one."""
        with self._using, contextlib.suppress(UnknownModelError, ModelError):
            model_dir = self.model_dir(name)
            if not model_dir.is_relative_to(self.root) or read_manifest(model_dir) is None:
                return
            use = msgspec.json.encode(change(_read_use(model_dir))).decode()
            self._disk.write(model_dir / USE_FILE, use, "when models were used")

    def fetched(self) -> list[FetchedModel]:
        """Returns all fetched models, the least recently used first."""
        return sorted(self._fetched(), key=lambda one: (one.used_at, one.name))

    def _fetched(self) -> Iterator[FetchedModel]:
        for model_dir in _directories(self.root):
            with contextlib.suppress(ModelError, OSError):
                manifest = read_manifest(model_dir)
                if manifest is not None:
                    used = model_dir / USE_FILE
                    used_at = (used if used.exists() else model_dir).stat().st_mtime
                    use = _read_use(model_dir)
                    yield FetchedModel(
                        model_dir.relative_to(self.root).as_posix(),
                        model_dir,
                        _disk_bytes(model_dir),
                        manifest.is_whole,
                        use.is_pinned,
                        used_at,
                        "" if use.is_pinned else use.store,
                    )

    def delete(self, name: str) -> int | None:
        """Deletes a fetched model, even with a damaged manifest, and the rests of interrupted deletions. Returns the
        freed bytes on the disk; None if nothing was fetched.

        Raises FetchError if the files cannot be deleted.
        """
        try:
            return self._delete(name)
        except OSError as exc:
            raise FetchError(
                f"the files of {name} cannot be deleted: {exc.strerror or type(exc).__name__}",
                remedy=f"delete them below {self.root.name} in the home of this node by hand",
                is_final=True,
            ) from exc

    def _delete(self, name: str) -> int | None:
        for leftover in self.root.glob(f"{GONE_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if not is_model_name(name):
            return None
        model_dir = self.root / name
        is_fetched = (model_dir / MANIFEST_FILE).is_file()
        if not is_fetched and not (self._is_store and (model_dir / "config.json").is_file()):
            return None
        freed_bytes = _disk_bytes(model_dir)
        scratch = self.root / f"{GONE_PREFIX}{os.getpid()}-{time.monotonic_ns()}"
        model_dir.rename(scratch)  # renamed first, so that no reader finds half a model
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            if model_dir.parent != self.root:
                model_dir.parent.rmdir()
        return freed_bytes

    def room(self, max_bytes: int | None, models: Collection[FetchedModel]) -> int:
        """Returns how many bytes may be fetched now, given the `models` that are there."""
        free = max(0, self._disk.free_bytes - self._disk.floor_bytes)
        if max_bytes is None:
            return free
        return min(free, max(0, max_bytes - sum(one.num_bytes for one in models)))


def gguf_dir(root: Path, name: str) -> Path | None:
    """Returns the directory of GGUF files that were fetched under a name; None if the name has none."""
    with contextlib.suppress(ModelError, OSError):
        manifest = read_manifest(root / name) if is_model_name(name) else None
        if manifest is not None and manifest.files and all(file.endswith(".gguf") for file in manifest.files):
            return root / name
    return None


def size_of_pieces(pieces: Pieces) -> int:
    return sum(num_bytes(spans) for spans in pieces.values())


def _manifest_of(name: str, model_dir: Path) -> Manifest | None:
    """Like read_manifest, with the remedy for a damaged manifest."""
    try:
        return read_manifest(model_dir)
    except ModelError as exc:
        raise ModelError(with_remedy(str(exc), name)) from exc


def _present(manifest: Manifest, file: str) -> Spans:
    fetched = manifest.files.get(file)
    return () if fetched is None else tuple(fetched.present)


def _read_use(model_dir: Path) -> _Use:
    try:
        return msgspec.json.decode((model_dir / USE_FILE).read_bytes(), type=_Use)
    except (OSError, msgspec.DecodeError):
        return _Use()


def _disk_bytes(model_dir: Path) -> int:
    """Returns the bytes that a directory takes on the disk; holes in files do not count."""
    with os.scandir(model_dir) as entries:
        return sum(512 * entry.stat(follow_symlinks=False).st_blocks for entry in entries)


def _directories(root: Path) -> Iterator[Path]:
    """Yields `<name>` and `<org>/<name>`."""
    for top in _below(root):
        yield top
        yield from _below(top)


def _below(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []
