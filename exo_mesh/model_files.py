"""Open the files of a model directory, whose author may be a stranger.

Only regular files of bounded size are read, and only inside the model's own directory or among the blobs of the same
model in a Hugging Face cache. Opening a pipe or a device in place of a file never blocks.
"""

from __future__ import annotations

import errno
import os
import re
import reprlib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from exo_mesh.errors import ModelError
from exo_mesh.printable import escaped

MAX_JSON_BYTES = 8 * 2**20
"""Of config.json and its like. The largest that we know lists thousands of layers left unquantised: some 100 KB."""

MAX_JSON_VALUES = 500_000
"""Values in one such file. A value costs 21 times as much memory as its text, so bytes alone are no bound."""

MAX_TOKENIZER_BYTES = 64 * 2**20
"""Of tokenizer.json; the largest have about 40 MB."""

MAX_MESSAGE = 400
"""Characters of a sentence about a model. Names and values in its files may be megabytes long."""

_PIECE_BYTES = 2**20
HUB_DIR = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")
"""How a Hugging Face cache names the directory of a model; its `snapshots` have links to its `blobs`."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def label(model_dir: Path) -> str:
    """What to call a model by its directory alone: `org/name` in a Hugging Face cache, else the directory's name."""
    hub = HUB_DIR.fullmatch(model_dir.parent.parent.name) if model_dir.parent.name == "snapshots" else None
    return f"{hub['org']}/{hub['name']}" if hub else model_dir.name


def named(file: Path) -> str:
    """A file of a model as errors name it: by model and file name, without the path, which is not for callers."""
    return f"{label(file.parent)}: {file.name}"


def shown(value: object) -> str:
    """A value from a file, short enough for an error."""
    return _REPR.repr(value)


def one_line(text: str) -> str:
    """A sentence without line breaks and control characters, at most MAX_MESSAGE long."""
    line = escaped(text[: MAX_MESSAGE + 1])
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"


def without_paths(text: str, model_dir: Path) -> str:
    """A sentence of an engine about a model, with the model's name in place of its directory's path."""
    name = label(model_dir)
    for path in dict.fromkeys((str(model_dir), os.path.realpath(model_dir))):
        text = text.replace(f"{path}/", f"{name}: ").replace(path, name)
    return text


def exists(file: Path) -> bool:
    """Checks whether there is anything by this name, be it a broken link or a pipe; reading it says what is wrong."""
    return os.path.lexists(file)


def open_model_file(file: Path) -> BinaryIO:
    """Open a file of the model directory `file.parent`.

    Raises FileNotFoundError if there is none, ModelError if it is no regular file or lies outside the model.
    """
    try:
        inside = _resolve(file)
        _require_regular(file, os.stat(inside).st_mode)  # before it is opened: that alone has effects on some devices
        descriptor = os.open(inside, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        if not os.path.islink(file):
            raise
        raise ModelError(f"{named(file)} is a link to a file that does not exist") from exc
    except (OSError, ValueError) as exc:
        raise ModelError(f"{named(file)} cannot be read: {_reason(exc)}") from exc
    try:
        _require_regular(file, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def size_of(file: Path) -> int:
    """Bytes of a file of the model directory `file.parent`. Raises as open_model_file."""
    with open_model_file(file) as stream:
        return os.fstat(stream.fileno()).st_size


def read_model_file(file: Path, max_bytes: int) -> bytes:
    """The content of a file of the model directory `file.parent`. Raises as open_model_file, and if it is too large."""
    return b"".join(read_in_pieces(file, max_bytes))


def read_in_pieces(file: Path, max_bytes: int) -> Iterator[bytes]:
    """As read_model_file, at most 1 MiB at a time."""
    with open_model_file(file) as stream:
        check_size(file, os.fstat(stream.fileno()).st_size, max_bytes)
        left = max_bytes
        while piece := _read(file, stream, min(left + 1, _PIECE_BYTES)):
            left -= len(piece)
            check_size(file, max_bytes - left, max_bytes)
            yield piece


def read_json_text(file: Path) -> bytes:
    """The text of a JSON file that is small enough to be parsed. Raises as read_model_file."""
    text = read_model_file(file, MAX_JSON_BYTES)
    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    if values > MAX_JSON_VALUES:
        raise ModelError(f"{named(file)} has more than {MAX_JSON_VALUES} values")
    return text


def check_size(file: Path, num_bytes: int, max_bytes: int) -> None:
    """Raises ModelError if a file is larger than it may be."""
    if num_bytes > max_bytes:
        raise ModelError(f"{named(file)} has {num_bytes} bytes, more than the {max_bytes} that are read")


def _resolve(file: Path) -> Path:
    """Where a file really is. Raises OSError, and ModelError if that is outside the model."""
    real = Path(os.path.realpath(file, strict=True))
    root = Path(os.path.realpath(file.parent, strict=True))
    hub = root.parent.parent if root.parent.name == "snapshots" else None
    in_blobs = hub is not None and HUB_DIR.fullmatch(hub.name) and real.is_relative_to(hub / "blobs")
    if not in_blobs and not real.is_relative_to(root):
        raise ModelError(
            f"{named(file)} is a link that leads out of the model's directory; "
            "put the file itself there, or link the directory as a whole"
        )
    return real


def _require_regular(file: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}
        raise ModelError(f"{named(file)} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a regular file")


def _read(file: Path, stream: BinaryIO, num_bytes: int) -> bytes:
    try:
        return stream.read(num_bytes)
    except OSError as exc:
        raise ModelError(f"{named(file)} cannot be read: {_reason(exc)}") from exc


def _reason(exc: OSError | ValueError) -> str:
    """Why, without the path that str(exc) would have."""
    if isinstance(exc, OSError):
        return "its links go round in a circle" if exc.errno == errno.ELOOP else exc.strerror or type(exc).__name__
    return "its name is none that a file can have"
