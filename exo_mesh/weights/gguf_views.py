"""Model directories for GGUF files that lie in a directory of models: config and tokenizer, and links to the files.

Everything else reads a model directory, so each GGUF model gets one, below the home of the node. It is made when the
model is first used, by a child process with limits, and made again when the file has changed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from exo_mesh.errors import ModelError
from exo_mesh.weights.fetched import SCRATCH_PREFIX
from exo_mesh.weights.gguf_table import is_model_file, read_headers, shard_names, without_shard
from exo_mesh.weights.model_files import (
    CONFIG,
    MAX_TOKENIZER_BYTES,
    TOKENIZER,
    VIEW_FILE,
    exists,
    label,
    read_model_file,
)
from exo_mesh.weights.names import usable_file_name
from exo_mesh.weights.safetensors import INDEX_FILE, SINGLE_FILE

MAKER = 1
"""Version of the rules by which texts are made from metadata; views of other versions are made again."""

LIMIT_S = 60.0
"""Most seconds of computing and of waiting. A vocabulary of 262,000 tokens takes about 5 s."""

MEMORY_BYTES = 2 * 10**9
MAX_NAMES = 10_000
"""Most entries of a directory that are looked at."""

_QUANTISATION = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q[1-8]|TQ[12])(?:_[A-Za-z0-9]+)*|BF16|F16|F32|MXFP4(?:_[A-Za-z0-9]+)*)(?![A-Za-z0-9])",
    re.IGNORECASE,
)


class GgufSource(msgspec.Struct, frozen=True):
    """A GGUF model: its directory, and the name of its only file or first shard."""

    directory: Path
    first: str

    @property
    def files(self) -> list[Path]:
        return [self.directory / name for name in shard_names(self.first)]


class _View(msgspec.Struct):
    """The content of VIEW_FILE. links: the real path of each linked file; stamp: see `_stamp`."""

    links: dict[str, str]
    stamp: list[list[int]]
    maker: int


def quantisation_of(name: str) -> str:
    """The quantisation in the name of a file, such as Q4_K_M; "" if there is none."""
    found = _QUANTISATION.findall(without_shard(name))
    return str(found[-1]).upper() if found else ""


def gguf_sources(directory: Path, name: str) -> Iterator[tuple[str, GgufSource]]:
    """The GGUF models in the directory of a model `name`, by the name that each has in the mesh: with its quantisation,
    as if it were fetched from a hub under `name`."""
    firsts = _model_files(directory)
    for first in firsts:
        quantisation = quantisation_of(first)
        if quantisation and not name.upper().endswith(quantisation):
            yield f"{name}-{quantisation}", GgufSource(directory, first)
        else:
            yield name if len(firsts) == 1 else without_shard(first), GgufSource(directory, first)


def loose_sources(directory: Path) -> Iterator[tuple[str, GgufSource]]:
    """The GGUF models directly in a directory of models, by the names of their files."""
    for first in _model_files(directory):
        yield without_shard(first), GgufSource(directory, first)


def has_only_gguf(directory: Path) -> bool:
    """Whether the weights in a directory are GGUF files, and no safetensors."""
    if exists(directory / SINGLE_FILE) or exists(directory / INDEX_FILE):
        return False  # nearly all directories: found without reading the directory
    names = _names(directory)
    return any(map(is_model_file, names)) and not any(name.endswith(".safetensors") for name in names)


def ensure_view(view_dir: Path, source: GgufSource) -> None:
    """Make the model directory of a GGUF model, unless it is there and the files have not changed since. Blocks.

    Raises ModelError if the model cannot be used, or the directory cannot be written.
    """
    try:
        stamp = _stamp(source)
        if _is_current(view_dir, stamp):
            return
        scratch = view_dir.with_name(f"{SCRATCH_PREFIX}{os.getpid()}-{view_dir.name}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            make_texts(source, scratch)
            links = {usable_file_name(file.name): os.path.realpath(file) for file in source.files}
            for name, path in links.items():
                (scratch / name).symlink_to(path)
            (scratch / VIEW_FILE).write_bytes(msgspec.json.encode(_View(links, stamp, MAKER)))
            shutil.rmtree(view_dir, ignore_errors=True)
            scratch.rename(view_dir)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as exc:
        what = f"{source.first} cannot be prepared: {exc.strerror or type(exc).__name__}"
        raise ModelError(what) from exc


def stamp_of(source: GgufSource) -> object:
    """A value that changes whenever a file of the model is written. A text is the reason why there is none."""
    try:
        return tuple(tuple(one) for one in _stamp(source))
    except OSError as exc:
        file = Path(exc.filename).name if isinstance(exc.filename, str) else source.first
        return f"{file} cannot be read: {exc.strerror or type(exc).__name__}"


def drop_views(views_dir: Path, kept: set[Path]) -> None:
    """Delete the views of models that are no longer there. kept: the directories of the others."""
    try:
        with os.scandir(views_dir) as entries:
            old = [Path(entry.path) for entry in itertools.islice(entries, MAX_NAMES) if entry.is_dir()]
    except OSError:
        return
    for view_dir in old:
        if view_dir not in kept and (view_dir / VIEW_FILE).is_file():
            shutil.rmtree(view_dir, ignore_errors=True)


def _names(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in itertools.islice(entries, MAX_NAMES))
    except OSError:
        return []


def _model_files(directory: Path) -> list[str]:
    return [name for name in _names(directory) if is_model_file(name)]


def _stamp(source: GgufSource) -> list[list[int]]:
    """Size and time of every file, of a tokenizer beside them, too. Raises OSError."""
    found = [file.stat() for file in source.files]
    beside = source.directory / TOKENIZER
    if beside.is_file():
        found.append(beside.stat())
    return [[one.st_size, one.st_mtime_ns, one.st_ino] for one in found]


def _is_current(view_dir: Path, stamp: list[list[int]]) -> bool:
    try:
        view = msgspec.json.decode(read_model_file(view_dir / VIEW_FILE, 2**20), type=_View)
    except (OSError, ModelError, msgspec.DecodeError):
        return False
    return view.stamp == stamp and view.maker == MAKER and exists(view_dir / CONFIG)


def make_texts(source: GgufSource, out: Path) -> tuple[str, ...]:
    """Let a child process write the texts of a model to `out`; returns the names of the files. Blocks. Raises
    ModelError, and OSError if no process can be started."""
    command = [sys.executable, "-m", "exo_mesh.weights.gguf_views", str(source.directory), source.first, str(out)]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False, start_new_session=True
        )
        answer = json.loads(child.stdout)
    except subprocess.TimeoutExpired as exc:
        raise ModelError(f"{source.first}: reading its header takes more than {LIMIT_S:.0f} s") from exc
    except ValueError as exc:
        raise ModelError(f"{source.first}: reading its header failed") from exc
    if answer.get("unusable"):
        raise ModelError(str(answer["unusable"]))
    return tuple(map(str, answer["made"]))


def write_texts(directory: Path, first: str, out: Path) -> list[str]:
    """Write the texts of a GGUF model to `out`; returns their names. Raises ModelError naming the model, and
    OSError."""
    beside = directory / TOKENIZER
    try:
        from exo_mesh.weights.gguf_layout import texts_of_gguf  # only for new GGUF files

        texts = texts_of_gguf(read_headers(directory, first), has_tokenizer=exists(beside))
        if exists(beside):
            texts[TOKENIZER] = read_model_file(beside, MAX_TOKENIZER_BYTES)  # also if it is where they are written
    except ModelError as exc:
        text = str(exc)
        raise exc if text.startswith(label(directory)) else ModelError(f"{label(directory)}: {first}: {text}") from exc
    for name, text_bytes in texts.items():
        (out / name).write_bytes(text_bytes)
    return list(texts)


def main(argv: Sequence[str]) -> int:
    """Write the texts; print {"made": names} or {"unusable": why}."""
    from exo_mesh.base.process_limits import limit_work

    directory, first, out = argv
    limit_work(LIMIT_S, MEMORY_BYTES)
    try:
        answer: dict[str, object] = {"made": write_texts(Path(directory), first, Path(out))}
    except ModelError as exc:
        answer = {"unusable": str(exc)}
    except MemoryError:
        answer = {"unusable": f"{first}: its header takes more than {MEMORY_BYTES // 10**9} GB of memory to read"}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
