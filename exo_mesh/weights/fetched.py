"""A model directory whose files arrive in parts, and the manifest of the bytes that are there.

An incomplete checkpoint file is called `NAME.part`. It has its full size from the start, with holes where bytes are
missing, so that engines can open it like the whole file; other programs ignore it because of its name. Its header, and
the few bytes that a card's digest is computed over, are there from the start, with config and tokenizer. So a card can
be read, and a plan made, before the weights are fetched. The file gets its own name when it is whole and checked.

Only the process that fetches writes into such a directory. A span is added to the manifest after its bytes are on disk.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from exo_mesh.domain.spans import Digests, Pieces, Span, Spans, covers, merged, num_bytes
from exo_mesh.errors import ModelError
from exo_mesh.weights.card import is_head, is_side_model, is_vision, is_vocabulary, layer_of
from exo_mesh.weights.model_files import named, read_model_file, shown
from exo_mesh.weights.names import FILE_NAME
from exo_mesh.weights.safetensors import PART, TensorTable, on_disk

MANIFEST_FILE = "exo-mesh.files"
MAX_MANIFEST_BYTES = 16 * 2**20

SCRATCH_PREFIX = ".fetch-"
"""Prefix of directories that are being made or deleted; they are not searched for models."""

WHOLE_FILE_SHARE = 0.95
"""From this share of a file on, all of it is fetched: the file can then be checked against its digest."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class FetchedFile(msgspec.Struct):
    """One checkpoint file, and the bytes of it that a machine has: this one by its manifest, or a peer by its report.

    A file that a source only lists is a files.listing.FileInfo. size: in bytes, of the whole file. sha256: of the whole
    file, "" if unknown. present: bytes that are on disk, merged. is_checked: the file is whole and its digest was
    right. verified: bytes that belonged to a file with the right digest when they were checked, merged; of a file that
    is not whole. stamp: the file on disk as it was then, see `stamp_of`; () if an older version has checked it. pieces:
    digests of the pieces of the file with the right digest, if this machine or a peer of its closed mesh has read all
    of it. Peers report none of these of their files.
    """

    size: _Size
    sha256: str = ""
    present: list[Span] = []
    is_checked: bool = False
    verified: list[Span] = []
    pieces: Digests = ()
    stamp: tuple[int, ...] = ()

    @property
    def is_unverified(self) -> bool:
        """Whether bytes are here that were not compared with the digest; without a digest, with two other sources."""
        return not (self.is_checked or covers(tuple(self.verified), tuple(self.present)))

    def is_unverified_in(self, model_dir: Path, name: str) -> bool:
        """The same, also if another program has changed the file since then."""
        return self.is_unverified or self.is_altered_in(model_dir, name)

    def is_altered_in(self, model_dir: Path, name: str) -> bool:
        """Whether the file is another one than when its bytes were compared."""
        return bool(self.stamp) and stamp_of(model_dir, name) != self.stamp

    @property
    def is_whole(self) -> bool:
        return covers(tuple(self.present), ((0, self.size),))


class Manifest(msgspec.Struct):
    """The known files of a fetched model.

    name: the name in requests. repo, revision: its source, a hub id and a commit; "" for a model that is only in the
    mesh. files: checkpoint files by name; config and tokenizer files are always whole and not listed. made: text files
    that are on no hub: a fetcher made them from others (tokenizer.json from vocab.json and merges.txt). Peers copy them
    as they are, so that all have the same tokenizer, whatever versions of libraries they have. git_ids: of text files,
    as the hub lists them, by name; a peer that copies a text file compares it with its id.
    """

    name: str
    repo: str = ""
    revision: str = ""
    files: dict[str, FetchedFile] = {}
    made: list[str] = []
    git_ids: dict[str, str] = {}

    @property
    def is_whole(self) -> bool:
        return all(file.is_whole for file in self.files.values())

    @property
    def present_bytes(self) -> int:
        return sum(num_bytes(file.present) for file in self.files.values())


def read_manifest(model_dir: Path) -> Manifest | None:
    """The manifest of a directory; None if it has none: then all its files are whole. Raises ModelError if the manifest
    cannot be used."""
    file = model_dir / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(read_model_file(file, MAX_MANIFEST_BYTES), type=Manifest)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ModelError(f"{named(file)} cannot be used: {exc}") from exc
    for name, fetched in manifest.files.items():
        spans = tuple(fetched.present)
        if not FILE_NAME.fullmatch(name) or merged(spans) != spans or not covers(((0, fetched.size),), spans):
            raise ModelError(f"{named(file)} cannot be used: {shown(name)} has impossible byte ranges")
    return manifest


def with_remedy(problem: str, name: str) -> str:
    """Adds the remedy to a problem with the files of a fetched model. The files were right when they were fetched."""
    return f"{problem}; delete the model with `exo-mesh rm {name}`, then fetch it again with `exo-mesh pull {name}`"


def write_manifest(model_dir: Path, manifest: Manifest) -> None:
    """Replace the manifest as a whole. Raises OSError."""
    file = model_dir / MANIFEST_FILE
    scratch = file.with_name(f"{file.name}.new")
    with os.fdopen(open_own_file(scratch, os.O_CREAT | os.O_TRUNC), "wb") as stream:
        stream.write(msgspec.json.encode(manifest))
        stream.flush()
        os.fsync(stream.fileno())
    scratch.replace(file)


def open_own_file(file: Path, flags: int = 0, mode: int = 0o644) -> int:
    """Open a file of a model directory for writing; returns the descriptor. Raises OSError for a link or a pipe, which
    the author of the directory may have put there."""
    descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, mode)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file")


def part_of(model_dir: Path, name: str) -> Path:
    """The path of the bytes of a checkpoint file that is not whole."""
    return model_dir / f"{name}{PART}"


def stamp_of(model_dir: Path, name: str) -> tuple[int, ...]:
    """Size, time of the last change in ns, and inode of a checkpoint file; () if it is not there. What changes bytes
    without these, such as a broken disk, is not noticed."""
    try:
        found = on_disk(model_dir / name).stat()
    except OSError:
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino


_Part = Literal["every", "first", "embedding", "head"]
"""Tensors that belong to no layer: of every stage, of the first one, the embedding, and norm and head."""


class LayerPieces:
    """The byte ranges that stages of a model load, from one pass over its tensors.

    A stage loads the tensors of its layers, on the first stage the embedding and a vision tower, on the last one norm
    and head, and on every stage the tensors that belong to no layer and no vocabulary. Tensors that no engine loads
    (towers for sound, layers past num_layers) are left out. tied: `tie_word_embeddings` of config.json, None if it is
    not there; then engines differ, and the last stage gets the embedding too.
    """

    def __init__(self, table: TensorTable, num_layers: int, *, tied: bool | None) -> None:
        self._num_layers = num_layers
        self._shares_embedding = tied is not False or not any(map(is_head, table))
        self._sizes: dict[str, int] = {}
        found: dict[int | _Part, dict[str, list[Span]]] = {}
        for name, info in table.items():
            file = info.file.name.removesuffix(PART)
            self._sizes[file] = max(self._sizes.get(file, 0), info.stop)
            if (part := _part_of(name)) is not None:
                found.setdefault(part, {}).setdefault(file, []).append((info.start, info.stop))
        self._parts = {part: {file: merged(spans) for file, spans in pieces.items()} for part, pieces in found.items()}

    def of(self, start: int, stop: int) -> dict[str, Spans]:
        """The pieces of the stage `[start, stop)`, by the name of the whole file. A file is listed whole if the needed
        share is WHOLE_FILE_SHARE or more. Otherwise headers are left out: they are always there."""
        found: dict[str, list[Span]] = {}
        for part in self._needed(start, stop):
            for file, spans in self._parts[part].items():
                found.setdefault(file, []).extend(spans)
        needed = {file: merged(spans) for file, spans in found.items()}
        return {
            file: ((0, self._sizes[file]),) if self._is_most(file, num_bytes(spans)) else spans
            for file, spans in needed.items()
        }

    def ranges_here(self, manifest: Manifest) -> list[range]:
        """The longest ranges of layers with all bytes on disk."""
        here = {part for part, pieces in self._parts.items() if is_here(manifest, pieces)}
        sizes = {
            part: {file: num_bytes(spans) for file, spans in pieces.items()} for part, pieces in self._parts.items()
        }
        parts = {file for file, one in manifest.files.items() if not one.is_whole}

        def is_range_here(start: int, stop: int) -> bool:
            needed = self._needed(start, stop)
            totals: Counter[str] = Counter()
            for part in needed:
                totals.update(sizes[part])
            return here.issuperset(needed) and not any(self._is_most(file, totals[file]) for file in parts)

        found: list[range] = []
        start = 0
        while start < self._num_layers:
            stops = range(start + 1, self._num_layers + 1)
            stop = next((one - 1 for one in stops if not is_range_here(start, one)), self._num_layers)
            if stop > start:
                found.append(range(start, stop))
            start = max(stop, start + 1)
        return found

    def _needed(self, start: int, stop: int) -> set[int | _Part]:
        needed: set[int | _Part] = {"every", *range(start, stop)}
        if start == 0:
            needed |= {"first", "embedding"}
        if stop == self._num_layers:
            needed |= {"head", "embedding"} if self._shares_embedding else {"head"}
        return needed & self._parts.keys()

    def _is_most(self, file: str, needed_bytes: int) -> bool:
        return needed_bytes >= WHOLE_FILE_SHARE * self._sizes.get(file, math.inf)


def is_here(manifest: Manifest | None, pieces: Pieces) -> bool:
    """Whether these bytes are on disk. Without a manifest all bytes are."""
    return manifest is None or all(
        name in manifest.files and covers(tuple(manifest.files[name].present), spans) for name, spans in pieces.items()
    )


def _part_of(name: str) -> int | _Part | None:
    """The layer of a tensor, or what else it belongs to; None if no engine loads it."""
    layer = layer_of(name)
    if layer is not None:
        return layer
    if is_side_model(name):
        return "first" if is_vision(name) else None
    if not is_vocabulary(name):
        return "every"
    return "head" if is_head(name) else "embedding"
