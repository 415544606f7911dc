"""The tensors of a model in GGUF files, under the names of transformers' checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from exo_mesh.errors import ModelError
from exo_mesh.weights.gguf import SUFFIX, GgufHeader, read_gguf
from exo_mesh.weights.gguf_families import ROPE_FACTORS, GgufFamily, checkpoint_name, family_of
from exo_mesh.weights.model_files import label, named, shown
from exo_mesh.weights.safetensors import PART, TensorInfo, TensorTable

MAX_SHARDS = 1_000

_SHARD = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BESIDE_MODELS = re.compile(r"(\A|[-_.])mmproj|(\A|[-_.])imatrix|\Amtp-", re.IGNORECASE)
"""Files beside a model: the projector of its pictures, statistics, drafting heads."""


class GgufTensor(TensorInfo, frozen=True):
    """A tensor of a GGUF file whose values differ from the checkpoint that it was made from.

    heads: the number of heads in whose rows the halves are interleaved; 0 if no rows were reordered. added: what was
    added to each value. Shape and bytes are those of the file.
    """

    heads: int = 0
    added: float = 0.0


def is_model_file(name: str) -> bool:
    """Whether a file name names a model, or its first shard."""
    if not name.endswith(SUFFIX) or _BESIDE_MODELS.search(name):
        return False
    shard = _SHARD.fullmatch(name)
    return shard is None or int(shard["number"]) == 1


def shard_names(first: str) -> list[str]:
    """The names of all files of a model, by the name of its only file or first shard."""
    shard = _SHARD.fullmatch(first)
    if shard is None:
        return [first]
    count = min(int(shard["count"]), MAX_SHARDS)
    return [f"{shard['base']}-{number:05d}-of-{shard['count']}{SUFFIX}" for number in range(1, count + 1)]


def without_shard(name: str) -> str:
    """The name of a model's file without suffix and the number of the shard."""
    shard = _SHARD.fullmatch(name)
    return shard["base"] if shard is not None else name.removesuffix(SUFFIX)


def find_first_file(model_dir: Path) -> str | None:
    """The name of the only model in a directory, whole or in parts; None if it has no GGUF file. Raises ModelError if
    it has several models."""
    try:
        names = {file.name.removesuffix(PART) for file in model_dir.iterdir()}
    except OSError:
        return None
    found = sorted(name for name in names if is_model_file(name))
    if len(found) > 1:
        raise ModelError(f"{label(model_dir)} has several GGUF models: {', '.join(found[:4])}")
    return found[0] if found else None


def read_headers(model_dir: Path, first: str) -> list[GgufHeader]:
    """The headers of all files of a model. Raises ModelError if a shard is missing or belongs to another model."""
    headers = [read_gguf(model_dir / name) for name in shard_names(first)]
    count = headers[0].integer("split.count", 1)
    if count and count != len(headers):
        raise ModelError(f"{named(model_dir / first)} is one of {count} files, but {len(headers)} are named so")
    for number, header in enumerate(headers):
        if len(headers) > 1 and header.integer("split.no", number) != number:
            raise ModelError(f"{named(model_dir / shard_names(first)[number])} has the place of another shard")
    return headers


def file_table(headers: Sequence[GgufHeader]) -> TensorTable:
    """All tensors by their names in the files. Raises ModelError if two files have the same one."""
    table: TensorTable = {}
    for header in headers:
        for name, info in header.table.items():
            if name in table:
                raise ModelError(f"{named(info.file)}: {name} is also in {table[name].file.name}")
            table[name] = info
    return table


def gguf_family(header: GgufHeader) -> GgufFamily | None:
    """The family of a model; None for one whose files only llama.cpp reads. Raises ModelError if the file has none."""
    architecture = header.architecture
    if not re.fullmatch(r"[\w.-]{1,64}", architecture):
        raise ModelError(f"general.architecture is {shown(architecture)}, which is not the name of an architecture")
    return family_of(architecture, header.integer(f"{architecture}.expert_count", 0) or 0)


def checkpoint_table(header: GgufHeader, table: TensorTable) -> TensorTable:
    """The tensors under the names of transformers' checkpoints, or under their own if the family is not known. header:
    of the first file.

    Raises ModelError for a tensor that the family does not have.
    """
    family = gguf_family(header)
    if family is None:
        return table
    heads = header.integer(f"{header.architecture}.attention.head_count", 0) or 0
    kv_heads = header.integer(f"{header.architecture}.attention.head_count_kv", heads) or heads
    renamed: TensorTable = {}
    for name, info in table.items():
        if name in ROPE_FACTORS:
            continue
        found = checkpoint_name(family, name)
        if found is None:
            raise ModelError(f"{named(info.file)}: {name} has no place in a model of {family.model_type}")
        renamed[found] = _checked(family, name, found, info, heads, kv_heads)
    return renamed


def read_gguf_table(model_dir: Path, first: str) -> TensorTable:
    """As checkpoint_table, of the files in a directory. Raises ModelError naming the file."""
    headers = read_headers(model_dir, first)
    try:
        return checkpoint_table(headers[0], file_table(headers))
    except ModelError as exc:
        text = str(exc)
        raise exc if text.startswith(label(model_dir)) else ModelError(f"{named(model_dir / first)}: {text}") from exc


def _checked(family: GgufFamily, name: str, found: str, info: TensorInfo, heads: int, kv_heads: int) -> TensorInfo:
    """The tensor with the differences of its family. Raises ModelError if its rows do not fit its heads."""
    if family.plus_one and found.endswith("norm.weight"):
        return GgufTensor(info.file, info.dtype, info.shape, info.start, info.stop, added=1.0)
    if ".ffn_gate_inp_shexp." in name and len(info.shape) == 1:
        return replace(info, shape=(1, *info.shape))
    parts = {"attn_q": heads, "attn_k": kv_heads}
    in_rows = parts.get(name.split(".")[2]) if family.interleaved and name.startswith("blk.") else None
    if in_rows is None:
        return info
    if not info.shape or not 0 < in_rows <= info.shape[0] or info.shape[0] % (2 * in_rows):
        raise ModelError(f"{named(info.file)}: {name} {list(info.shape)} does not have the rows of {in_rows} heads")
    return GgufTensor(info.file, info.dtype, info.shape, info.start, info.stop, heads=in_rows)
