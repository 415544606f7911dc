"""A model directory whose files arrive in parts, and the manifest that says which bytes are there.

A checkpoint file that is not whole is called `NAME.part`. It has its full size from the start, with holes where bytes
are missing, so that engines can open it as they open the whole one; no other program takes it for that. Its header, and
the few bytes that a card's digest is computed over, are there from the start, with config and tokenizer: so a card can
be read, and a plan made, before the weights are fetched. The file gets its own name when it is whole and checked.

Only the process that fetches writes into such a directory. A span is put into the manifest after its bytes are on disk.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Annotated

import msgspec

from exo_mesh.domain.spans import Pieces, Span, Spans, covers, merged, num_bytes
from exo_mesh.errors import ModelError
from exo_mesh.model_files import named, read_model_file
from exo_mesh.weights.card import is_head, is_side_model, is_vocabulary, layer_of
from exo_mesh.weights.names import FILE_NAME
from exo_mesh.weights.safetensors import PART, TensorTable

MANIFEST_FILE = "exo-mesh.files"
MAX_MANIFEST_BYTES = 16 * 2**20

SCRATCH_PREFIX = ".fetch-"
"""Begins the names of directories that are being made or deleted; no model is looked for in them."""

WHOLE_FILE_SHARE = 0.95
"""From this share of a file on, all of it is fetched: then it can be checked against its digest."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class FetchedFile(msgspec.Struct):
    """One checkpoint file, and how much of it a machine has: this one by its manifest, or a peer as it says.

    What a source only lists is a files.listing.FileInfo. size: in bytes, of the whole file. sha256: of the whole file,
    "" if nobody says. present: bytes that are on disk, merged. is_checked: the file is whole and its digest was found
    right; peers do not say that of theirs.
    """

    size: _Size
    sha256: str = ""
    present: list[Span] = []
    is_checked: bool = False

    @property
    def is_whole(self) -> bool:
        return covers(tuple(self.present), ((0, self.size),))


class Manifest(msgspec.Struct):
    """What is known of the files of a fetched model.

    name: by which requests name it. repo, revision: where it is from, a hub id and a commit; "" for a model that is
    only in the mesh. files: checkpoint files by name; config and tokenizer files are always whole and not listed.
    made: text files that are at no hub: a fetcher made them of others (tokenizer.json of vocab.json and merges.txt).
    Peers copy them as they are, so that all have the same tokenizer, whatever versions of libraries they have.
    """

    name: str
    repo: str = ""
    revision: str = ""
    files: dict[str, FetchedFile] = {}
    made: list[str] = []

    @property
    def is_whole(self) -> bool:
        return all(file.is_whole for file in self.files.values())

    @property
    def present_bytes(self) -> int:
        return sum(num_bytes(file.present) for file in self.files.values())


def read_manifest(model_dir: Path) -> Manifest | None:
    """The manifest of a directory, None if it has none: then all its files are whole. Raises ModelError if it has one
    that cannot be used."""
    file = model_dir / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(read_model_file(file, MAX_MANIFEST_BYTES), type=Manifest)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelError(f"{named(file)} cannot be used: {exc}") from exc
    for name, fetched in manifest.files.items():
        spans = tuple(fetched.present)
        if not FILE_NAME.fullmatch(name) or merged(spans) != spans or not covers(((0, fetched.size),), spans):
            raise ModelError(f"{named(file)} cannot be used: {name[:80]!r} has impossible spans")
    return manifest


def with_remedy(problem: str, name: str) -> str:
    """A problem with the files of a fetched model, and what a person can do. They were right when they were fetched."""
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
    """A descriptor to write a file of a model directory with. Raises OSError for a link or a pipe: the author of the
    directory may have put it there."""
    descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, mode)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file")


def part_of(model_dir: Path, name: str) -> Path:
    """Where the bytes of a checkpoint file that is not whole are."""
    return model_dir / f"{name}{PART}"


def pieces_of_layers(
    table: TensorTable, num_layers: int, start: int, stop: int, *, tied: bool | None
) -> dict[str, Spans]:
    """What the stage `[start, stop)` loads, by the name of the whole file: tensors of its layers, on the first stage
    the embedding, on the last one norm and head, and on every stage what belongs to no layer and no vocabulary. What no
    engine loads (towers, layers past num_layers) is left out.

    tied: `tie_word_embeddings` of config.json, None if it is not there; then engines differ, and the last stage gets
    the embedding too. Whole files where the share that is needed is WHOLE_FILE_SHARE or more. Headers are left out
    otherwise: they are always there.
    """
    shares_embedding = tied is not False or not any(map(is_head, table))
    found: dict[str, list[Span]] = {}
    sizes: dict[str, int] = {}
    for name, info in table.items():
        file = info.file.name.removesuffix(PART)
        sizes[file] = max(sizes.get(file, 0), info.stop)
        if _is_needed(name, num_layers, start, stop, shares_embedding=shares_embedding):
            found.setdefault(file, []).append((info.start, info.stop))
    pieces: dict[str, Spans] = {}
    for file, spans in found.items():
        needed = merged(spans)
        is_most = num_bytes(needed) >= WHOLE_FILE_SHARE * sizes[file]
        pieces[file] = ((0, sizes[file]),) if is_most else needed
    return pieces


def is_here(manifest: Manifest | None, pieces: Pieces) -> bool:
    """Checks whether these bytes are on disk. Without a manifest all are."""
    return manifest is None or all(
        name in manifest.files and covers(tuple(manifest.files[name].present), spans) for name, spans in pieces.items()
    )


def _is_needed(name: str, num_layers: int, start: int, stop: int, *, shares_embedding: bool) -> bool:
    layer = layer_of(name)
    if layer is not None:
        return start <= layer < stop
    if is_side_model(name):
        return False
    if not is_vocabulary(name):
        return True
    if is_head(name):
        return stop == num_layers
    return start == 0 or (stop == num_layers and shares_embedding)
