"""Fetches the headers of GGUF files, whose length is not known before, and makes a model's texts from them."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.domain.spans import Spans
from exo_mesh.errors import FetchError, ModelError
from exo_mesh.models.fetcher.download import Context, Download, UsedSource
from exo_mesh.models.fetcher.writing import DiskError, ModelWriter
from exo_mesh.weights.fetched import part_of
from exo_mesh.weights.gguf import GgufHeader, IncompleteHeaderError, parse_gguf
from exo_mesh.weights.gguf_layout import config_tensors
from exo_mesh.weights.gguf_table import file_table
from exo_mesh.weights.gguf_views import GgufSource, make_texts
from exo_mesh.weights.safetensors import PART, on_disk

FIRST_BYTES = 2**20
"""Bytes of the first file of a model that are read first; its vocabulary takes some MB. If the header is longer, twice
as many are read, and so on."""

SHARD_BYTES = 64 * 2**10
"""The same for further files, which have no vocabulary."""


def fetch_gguf_headers(
    writer: ModelWriter, names: Sequence[str], sources: tuple[UsedSource, ...], context: Context
) -> list[GgufHeader]:
    """Fetches the headers of a model's files. names: the first file first. Raises FetchError, and ModelError if a file
    is not a GGUF file."""
    return [
        _fetch_header(writer, name, FIRST_BYTES if name == names[0] else SHARD_BYTES, sources, context)
        for name in names
    ]


def make_gguf_texts(
    writer: ModelWriter, first: str, headers: Sequence[GgufHeader], sources: tuple[UsedSource, ...], context: Context
) -> None:
    """Writes config and tokenizer into the directory, from the metadata of the headers, and notes them in the manifest.
    Fetches the few tensors that belong to the config. first: the name of the first file.

    Raises FetchError, and ModelError if the model cannot be run.
    """
    wanted: dict[str, Spans] = {}
    for info in config_tensors(file_table(headers)):
        name = info.file.name.removesuffix(PART)
        wanted[name] = (*wanted.get(name, ()), (info.start, info.stop))
    if wanted:
        Download(writer, [(wanted, sources)], context).run()
    context.check()
    try:
        writer.note_made(make_texts(GgufSource(writer.model_dir, first), writer.model_dir))
    except OSError as exc:
        raise DiskError(f"{writer.name} cannot be written: {exc.strerror or type(exc).__name__}") from exc


def _fetch_header(
    writer: ModelWriter, name: str, first_bytes: int, sources: tuple[UsedSource, ...], context: Context
) -> GgufHeader:
    """Reads more and more of a file until its header is complete. A peer with only the header ends earlier."""
    size, reach = writer.manifest.files[name].size, first_bytes
    while True:
        problem: FetchError | None = None
        try:
            Download(writer, [({name: ((0, min(reach, size)),)}, sources)], context).run()
        except DiskError:
            raise
        except FetchError as exc:
            problem = exc
        missing = writer.missing(name, ((0, min(reach, size)),))
        present = missing[0][0] if missing else min(reach, size)
        file = on_disk(part_of(writer.model_dir, name))
        with file.open("rb") as stream:
            raw = stream.read(present)
        try:
            return parse_gguf(raw, file, size)
        except IncompleteHeaderError:
            if problem is not None:
                raise problem from None
            reach *= 2
        except ModelError:
            if problem is not None:
                raise problem from None
            raise
