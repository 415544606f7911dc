"""Creates a model's directory without its weights: config, tokenizer, headers, and the bytes for its card's digest.

The directory is built beside its final place under a name that no model can have, and renamed once a card can be read
from it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait as wait_for_futures
from pathlib import Path

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.spans import Pieces, joined
from exo_mesh.errors import CancelledRequestError, FetchError, MeshError, ModelError
from exo_mesh.models.fetcher.choosing import (
    default_quantisation,
    gguf_files,
    gguf_texts,
    require_runnable,
    text_files,
    weight_files,
)
from exo_mesh.models.fetcher.conversion import TOKENIZER, make_tokenizer
from exo_mesh.models.fetcher.download import Context, Download, UsedSource, read_whole
from exo_mesh.models.fetcher.gguf_headers import fetch_gguf_headers, make_gguf_texts
from exo_mesh.models.fetcher.writing import (
    LOCK_FILE,
    DiskError,
    ModelWriter,
    Writers,
    lock_directory,
    make_part,
    new_manifest,
    sync_directory,
)
from exo_mesh.models.file_server.listing import FileInfo, Listing
from exo_mesh.weights.card import check_quantisation, digest_samples, read_card
from exo_mesh.weights.fetched import MANIFEST_FILE, SCRATCH_PREFIX, part_of, write_manifest
from exo_mesh.weights.gguf import SUFFIX as GGUF_SUFFIX
from exo_mesh.weights.model_files import FOLDER_FILES, label, read_json, shown
from exo_mesh.weights.safetensors import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    MAX_HEADERS_BYTES,
    on_disk,
    read_weight_map,
)
from exo_mesh.weights.tensors import read_tensor_table

FIRST_BYTES = 64 * 2**10
"""Bytes of each file that are read first: the headers of most shards are shorter."""

NEAR_BYTES = 64 * 2**10
"""Samples at most this far apart are read by one request. With 8 concurrent requests and a latency of 50 ms, each
request costs about as much time as this many bytes at 100 Mbit/s."""

NEAR_PARTS = 1024
"""Samples in one request are also at most this fraction of their file apart: some 60 samples must stay a small part of
a small model."""


class SkeletonOrder(msgspec.Struct, frozen=True):
    """What to create, and from what. listing: of one source; sources: all that have these files, in order.

    quantisation: of a GGUF model on a hub; "" for safetensors, and for GGUF files with the texts that a peer has made
    from them. is_files_only: of a GGUF model, no texts are made, and nothing is read before its files are fetched.
    """

    name: str
    target: Path
    listing: Listing
    sources: tuple[UsedSource, ...]
    trust_remote_code: bool = False
    quantisation: str = ""
    is_files_only: bool = False


def is_made(target: Path) -> bool:
    """Whether the directory contains anything that a skeleton would replace. Raises DiskError."""
    try:
        return next(target.iterdir(), None) is not None
    except FileNotFoundError:
        return False
    except NotADirectoryError as exc:
        raise DiskError(
            f"a file has the place of the directory of {target.name} among the fetched models",
            remedy="move the file away",
            is_final=True,
        ) from exc
    except OSError as exc:
        raise DiskError(f"{target.name} cannot be read: {exc.strerror or type(exc).__name__}") from exc


def make_skeleton(order: SkeletonOrder, writers: Writers, context: Context) -> None:
    """Creates the skeleton. Raises FetchError, and ModelError if the model cannot be used. An error leaves no files."""
    if not order.quantisation and not order.listing.digest:  # a peer has chosen already
        order = replace(order, quantisation=default_quantisation(order.listing.files))
    if not order.quantisation:
        require_runnable(order.name, order.listing.files, is_peer=bool(order.listing.digest))
    with _scratch_beside(order.target) as scratch:
        try:
            _build(scratch, order, writers, context)
        except ModelError as exc:
            raise ModelError(str(exc).replace(scratch.name, order.name)) from exc
        _put_in_place(scratch, order.target)


def _build(scratch: Path, order: SkeletonOrder, writers: Writers, context: Context) -> None:
    if order.quantisation:
        _build_gguf(scratch, order, writers, context)
        return
    _fetch_texts(scratch, order, text_files(order.listing.files, with_code=order.trust_remote_code), context)
    _check_config(scratch, order)
    made = () if TOKENIZER in order.listing.files else make_tokenizer(scratch, order.name, context)
    index = scratch / INDEX_FILE
    named = set(read_weight_map(index).values()) if index.exists() else ()
    weights = weight_files(order.name, order.listing.files, named)
    _lay_out(scratch, order, weights, made)
    with writers.opened(scratch) as writer:
        fetch_headers(writer, list(weights), order.sources, context)
        _fetch_samples(writer, order.sources, context)
    card = read_card(scratch, order.name)
    if order.listing.digest and card.digest != order.listing.digest:
        raise FetchError(f"the fetched files of {order.name} do not have the digest that their source gave")


def _build_gguf(scratch: Path, order: SkeletonOrder, writers: Writers, context: Context) -> None:
    """Of one quantisation on a hub: its files by their base names, and the texts that their metadata gives."""
    weights = gguf_files(order.name, order.listing.files, order.quantisation)
    if order.is_files_only:
        _fetch_texts(scratch, order, text_files(order.listing.files, with_code=False), context)
        _lay_out(scratch, order, weights)
        return
    _fetch_texts(scratch, order, gguf_texts(order.listing.files), context)
    _lay_out(scratch, order, weights)
    with writers.opened(scratch) as writer:
        names = sorted(weights)
        headers = fetch_gguf_headers(writer, names, order.sources, context)
        make_gguf_texts(writer, names[0], headers, order.sources, context)
        _fetch_samples(writer, order.sources, context)
    read_card(scratch, order.name)


def has_header(model_dir: Path, name: str) -> bool:
    """Whether a file has a header that cards and plans are made from; GGUF files that cannot be run are only files."""
    return not name.endswith(GGUF_SUFFIX) or (model_dir / "config.json").exists()


def fetch_headers(writer: ModelWriter, names: Sequence[str], sources: tuple[UsedSource, ...], context: Context) -> None:
    """Fetches the headers of files. Raises FetchError, and ModelError if a file is not a safetensors or GGUF file."""
    if any(name.endswith(GGUF_SUFFIX) for name in names):
        fetch_gguf_headers(writer, sorted(names), sources, context)
        return
    sizes = {name: writer.manifest.files[name].size for name in names}
    first = {name: ((0, min(size, FIRST_BYTES)),) for name, size in sizes.items()}
    _fetch_or_less(writer, first, dict.fromkeys(names, ((0, 8),)), sources, context)
    stops = {name: header_stop(writer.model_dir, name, size) for name, size in sizes.items()}
    if sum(stops.values()) > MAX_HEADERS_BYTES:
        raise ModelError(f"{writer.name}: the headers have more than {MAX_HEADERS_BYTES} bytes together")
    Download(writer, [({name: ((0, stop),) for name, stop in stops.items()}, sources)], context).run()


def _fetch_samples(writer: ModelWriter, sources: tuple[UsedSource, ...], context: Context) -> None:
    """Fetches the bytes that the card's digest covers. Raises FetchError."""
    samples = digest_samples(read_tensor_table(writer.model_dir))
    sizes = {name: writer.manifest.files[name].size for name in samples}
    near = {name: joined(spans, min(NEAR_BYTES, sizes[name] // NEAR_PARTS)) for name, spans in samples.items()}
    _fetch_or_less(writer, near, samples, sources, context)


def _fetch_or_less(
    writer: ModelWriter, wanted: Pieces, needed: Pieces, sources: tuple[UsedSource, ...], context: Context
) -> None:
    """Fetches more than the needed pieces, in fewer requests; from sources without the rest, only the needed pieces."""
    try:
        Download(writer, [(wanted, sources)], context).run()
    except DiskError:
        raise
    except FetchError:  # peers with only headers and samples
        Download(writer, [(needed, sources)], context).run()


def header_stop(model_dir: Path, name: str, size: int) -> int:
    """Returns where the header of a safetensors file ends, from its first 8 bytes on the disk. Raises ModelError."""
    with on_disk(model_dir / name).open("rb") as stream:
        prefix = stream.read(8)
    stop = 8 + (struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES)
    if stop > min(size, MAX_HEADER_BYTES):
        raise ModelError(
            f"{label(model_dir)}: {name} is not a safetensors file: its header would end at byte {stop} of {size}"
        )
    return int(stop)


@contextlib.contextmanager
def _scratch_beside(target: Path) -> Iterator[Path]:
    """Yields an empty directory for this process, and deletes it afterwards unless it was renamed. Raises DiskError."""
    scratch = target.with_name(f"{SCRATCH_PREFIX}{target.name}")
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        os.close(lock_directory(scratch))  # raises if another process is at work
        shutil.rmtree(scratch)  # left by a process that was killed
        scratch.mkdir()
        yield scratch
    except OSError as exc:
        raise DiskError(f"{target.name} cannot be written: {exc.strerror or type(exc).__name__}") from exc
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fetch_texts(scratch: Path, order: SkeletonOrder, chosen: Mapping[str, FileInfo], context: Context) -> None:
    under_way = [
        context.executor.submit(_fetch_text, scratch, name, info, order, context) for name, info in chosen.items()
    ]
    try:
        for future in under_way:
            future.result()
    finally:
        wait_for_futures(under_way)


def _fetch_text(scratch: Path, name: str, info: FileInfo, order: SkeletonOrder, context: Context) -> None:
    problem: MeshError | None = None
    for source in (*order.sources, *order.sources[-1:]):  # wrong bytes may come once
        try:
            content = read_whole(source, name, info.size, context)
        except CancelledRequestError:
            raise
        except MeshError as exc:
            problem = exc
            continue
        if info.has_content(content):
            (scratch / FOLDER_FILES.get(name, name)).write_bytes(content)
            return
        where = f"peer {source.peer}" if source.peer else "the hub"
        problem = FetchError(f"{name} of {order.name} has wrong bytes at {where}: they do not match its digest")
    raise problem or FetchError(f"no source has {name} of {order.name}")


def _check_config(scratch: Path, order: SkeletonOrder) -> None:
    """Refuses what no engine can load, before any header is fetched."""
    config = read_json(scratch / "config.json")
    check_quantisation(scratch, config)
    if config.get("model_file") is not None and not order.trust_remote_code:
        raise FetchError(
            f"{order.name} asks to run code of its own ({shown(config['model_file'])}), which is not allowed",
            remedy="choose a model that mlx-lm or transformers support themselves",
            is_final=True,
        )


def _lay_out(scratch: Path, order: SkeletonOrder, weights: Mapping[str, FileInfo], made: tuple[str, ...] = ()) -> None:
    """Writes the manifest, and an empty part for each weight file."""
    listing = order.listing
    for name, info in weights.items():
        make_part(part_of(scratch, name), info.size)
    files = {name: (info.size, info.sha256) for name, info in weights.items()}
    manifest = new_manifest(order.name, listing.repo, listing.revision, files)
    manifest.git_ids = {
        FOLDER_FILES.get(name, name): info.git_id
        for name, info in listing.files.items()
        if info.git_id and (scratch / FOLDER_FILES.get(name, name)).exists()
    }
    manifest.made = [name for name in (*listing.made, *made) if (scratch / name).exists()]
    write_manifest(scratch, manifest)


def _put_in_place(scratch: Path, target: Path) -> None:
    for file in scratch.iterdir():
        if file.name not in (LOCK_FILE, MANIFEST_FILE):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    sync_directory(scratch)
    scratch.rename(target)
    sync_directory(target.parent)
