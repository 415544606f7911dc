"""Opens the files of a model directory, whose author may be a stranger.

Only regular files of bounded size are read, and only inside the model's own directory or among the blobs of the same
model in a Hugging Face cache. Opening a pipe or a device in place of a file never blocks.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from exo_mesh.base.printable import escaped, escaped_json
from exo_mesh.domain.model_settings import without_off
from exo_mesh.errors import ModelError

MAX_JSON_BYTES = 8 * 2**20
"""Largest config.json or similar file. The largest known lists thousands of unquantised layers: some 100 KB."""

MAX_JSON_VALUES = 500_000
"""Most values in one such file. A value costs 21 times as much memory as its text, so a byte limit is too weak."""

MAX_TOKENIZER_BYTES = 64 * 2**20
"""Largest tokenizer.json; the largest known have about 40 MB."""

MAX_MESSAGE = 400
"""Longest message about a model in characters. Names and values in its files may be megabytes long."""

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
"""Files of sentence-transformers: the steps from text to vector, the prompts, and the most tokens of a text."""

POOLING_FILE = "1_Pooling.config.json"
SCORE_FILE = "1_LogitScore.config.json"
TOOL_USE_FILE = "additional_chat_templates.tool_use.jinja"
ADDED_TOKENS_FILE = "added_tokens.json"
FOLDER_FILES = {
    "1_Pooling/config.json": POOLING_FILE,
    "1_LogitScore/config.json": SCORE_FILE,
    "additional_chat_templates/tool_use.jinja": TOOL_USE_FILE,
}
"""How hidden states become a vector, and logits a score, and the chat template for tools: the only files of a model in
folders that are used. Fetched models have them under these names, directly in the directory, as all their files."""

CONFIG, TOKENIZER = "config.json", "tokenizer.json"

VIEW_FILE = "exo-mesh.view"
"""A file in a directory that a node made for GGUF files elsewhere: the real paths of the files that are linked there.
See exo_mesh/weights/gguf_views.py."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES = 1024
"""A clone of a repository without Git LFS has a pointer in place of each large file: a text of some 130 bytes."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_FLOAT_TAG = "__float__"
_TAGGED_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""Newer versions of transformers write numbers that JSON does not have as `{"__float__": "Infinity"}`."""

_MAX_VIEW_BYTES = 2**20
_PIECE_BYTES = 2**20
_SHOWN_CHARS = 100
HUB_DIR = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")
"""The directory name of a model in a Hugging Face cache; its `snapshots` contain links to its `blobs`."""


def place_of(model_dir: Path, name: str) -> Path:
    """The path of a text file of a model; of one of FOLDER_FILES in the place that it has in this directory."""
    for path, flat_name in FOLDER_FILES.items():
        folder = model_dir / path.partition("/")[0]
        if name == flat_name and folder.is_dir() and not folder.is_symlink():
            return model_dir / path
    return model_dir / name


def read_steps(model_dir: Path) -> tuple[str, ...] | None:
    """The steps from text to vector or score in modules.json, by the last part of their class names; None without that
    file. Raises ModelError."""
    file = model_dir / MODULES_FILE
    try:
        steps = _parse_json(file, read_json_text(file))
    except FileNotFoundError:
        return None
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ModelError(f"{named(file)} is not a JSON list of objects")
    return tuple(str(step.get("type", "")).rpartition(".")[2] for step in steps)


def label(model_dir: Path) -> str:
    """Names a model by its directory alone: `org/name` in a Hugging Face cache, else the directory's name."""
    hub = HUB_DIR.fullmatch(model_dir.parent.parent.name) if model_dir.parent.name == "snapshots" else None
    return f"{hub['org']}/{hub['name']}" if hub else model_dir.name


def named(file: Path) -> str:
    """Names a file for errors: by model and file name, without the path, which callers must not see."""
    return f"{label(file.parent)}: {file.name}"


def shown(value: object) -> str:
    """Formats a value from a file for an error: as JSON, of at most 100 characters."""
    try:
        text = escaped_json(json.dumps(value, ensure_ascii=False, default=str))
    except (RecursionError, ValueError):
        return "a value that cannot be shown"
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def one_line(text: str) -> str:
    """Makes a sentence printable in one line of at most MAX_MESSAGE characters."""
    line = escaped(text[: MAX_MESSAGE + 1])
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"


def without_paths(text: str, model_dir: Path) -> str:
    """Replaces the model directory's path by the model's name in an engine's sentence."""
    name = label(model_dir)
    for path in dict.fromkeys((str(model_dir), os.path.realpath(model_dir))):
        text = text.replace(f"{path}/", f"{name}: ").replace(path, name)
    return text


def exists(file: Path) -> bool:
    """Checks whether a directory entry of this name exists, a broken link or a pipe included; reading it reports
    what is wrong."""
    return os.path.lexists(file)


def open_model_file(file: Path) -> BinaryIO:
    """Opens a file of the model directory `file.parent`.

    Raises FileNotFoundError if there is none, ModelError if it is not a regular file, lies outside the model, or is
    only a Git-LFS pointer.
    """
    try:
        inside = _resolve(file)
        _require_regular(file, os.stat(inside).st_mode)  # first: opening some devices has effects
        descriptor = os.open(inside, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        if not os.path.islink(file):
            raise
        raise ModelError(f"{named(file)} is a link to a file that does not exist") from exc
    except (OSError, ValueError) as exc:
        raise ModelError(f"{named(file)} cannot be read: {_reason(exc)}") from exc
    stream = os.fdopen(descriptor, "rb")
    try:
        state = os.fstat(descriptor)
        _require_regular(file, state.st_mode)
        if state.st_size <= _MAX_POINTER_BYTES:
            _refuse_pointer(file, stream)
    except BaseException:
        stream.close()
        raise
    return stream


def size_of(file: Path) -> int:
    """Returns the size in bytes of a file of the model directory `file.parent`. Raises as open_model_file."""
    with open_model_file(file) as stream:
        return os.fstat(stream.fileno()).st_size


def read_model_file(file: Path, max_bytes: int) -> bytes:
    """Reads a file of the model directory `file.parent`. Raises as open_model_file, also if it is too large."""
    return b"".join(read_in_pieces(file, max_bytes))


def read_in_pieces(file: Path, max_bytes: int) -> Iterator[bytes]:
    """Like read_model_file, but yields pieces of at most 1 MiB."""
    with open_model_file(file) as stream:
        check_size(file, os.fstat(stream.fileno()).st_size, max_bytes)
        left = max_bytes
        while piece := _read(file, stream, min(left + 1, _PIECE_BYTES)):
            left -= len(piece)
            check_size(file, max_bytes - left, max_bytes)
            yield piece


def read_json_text(file: Path) -> bytes:
    """Reads the text of a JSON file that is small enough to be parsed. Raises as read_model_file."""
    text = read_model_file(file, MAX_JSON_BYTES)
    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    if values > MAX_JSON_VALUES:
        raise ModelError(f"{named(file)} has more than {MAX_JSON_VALUES} values")
    return text


def read_json(file: Path, *, as_written: bool = False) -> dict[str, Any]:
    """Returns the JSON object in a file of a model. This is the only reader of these files. It accepts what
    transformers accepts, such as Infinity, and also a byte-order mark, and -1 for null. as_written: keep -1 and tagged
    numbers, for digests that older peers compute, too. Raises ModelError that names the cause."""
    try:
        value = _parse_json(file, read_json_text(file), as_written=as_written)
    except FileNotFoundError as exc:
        raise ModelError(f"{named(file)} cannot be read: there is no such file") from exc
    if not isinstance(value, dict):
        raise ModelError(f"{named(file)} is not a JSON object")
    return without_off(value) if file.name == "config.json" and not as_written else value


def read_json_if_there(file: Path) -> dict[str, Any]:
    """As read_json; {} if there is no such file."""
    return read_json(file) if exists(file) else {}


def read_tokenizer_text(file: Path) -> str:
    """Returns the text of a tokenizer.json, without a byte-order mark: the tokenizers library refuses one. Raises as
    read_model_file, and ModelError if it is not UTF-8."""
    return as_text(file, read_model_file(file, MAX_TOKENIZER_BYTES))


def without_mark(data: bytes) -> bytes:
    """The content of a file without a byte-order mark."""
    return data.removeprefix(_BYTE_ORDER_MARK)


def as_text(file: Path, data: bytes) -> str:
    """Decodes the UTF-8 content of a file, without a byte-order mark. Raises ModelError."""
    try:
        return without_mark(data).decode("utf-8")
    except UnicodeDecodeError as exc:
        kind = "UTF-16 text" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else f"wrong at byte {exc.start}"
        raise ModelError(f"{named(file)} is not UTF-8 text ({kind}); save or download it again as UTF-8") from exc


def _parse_json(file: Path, data: bytes, *, as_written: bool = False) -> Any:
    """Parses JSON as Python does, which also knows Infinity, -Infinity and NaN. Raises ModelError."""
    text = as_text(file, data)
    if not text.strip():
        raise ModelError(f"{named(file)} is empty; download it again")
    try:
        has_tags = _FLOAT_TAG in text and not as_written
        value = json.loads(text, object_hook=_untagged if has_tags else None)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as exc:
        raise ModelError(f"{named(file)} is not valid JSON: {_fault(text, exc)}") from exc
    except UnicodeEncodeError as exc:
        raise ModelError(f"{named(file)} is not valid JSON: it contains a lone surrogate (U+D800 to U+DFFF)") from exc
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{named(file)} is not valid JSON: {exc}") from exc
    return value


def _fault(text: str, exc: json.JSONDecodeError) -> str:
    """Names the cause of a parser's error."""
    if text.lstrip().startswith("<"):
        return "it is a web page or XML; download the file itself"
    if exc.pos >= len(text.rstrip()) or exc.msg.startswith("Unterminated string"):
        return f"it is cut short after {len(text)} characters; download it again"
    return str(exc)


def _untagged(found: dict[str, Any]) -> Any:
    """The number that transformers wrote as an object; any other object as it is."""
    tag = found.get(_FLOAT_TAG)
    return _TAGGED_FLOATS[tag] if len(found) == 1 and isinstance(tag, str) and tag in _TAGGED_FLOATS else found


def check_size(file: Path, num_bytes: int, max_bytes: int) -> None:
    """Raises ModelError if a file is larger than `max_bytes`."""
    if num_bytes > max_bytes:
        raise ModelError(f"{named(file)} has {num_bytes} bytes, more than the limit of {max_bytes}")


def _resolve(file: Path) -> Path:
    """Follows links to the real file. Raises OSError, and ModelError if the file is outside the model."""
    real = Path(os.path.realpath(file, strict=True))
    root = Path(os.path.realpath(file.parent, strict=True))
    snapshot = next((one for one in (root, root.parent) if one.parent.name == "snapshots"), None)
    hub = None if snapshot is None else snapshot.parent.parent
    in_blobs = hub is not None and HUB_DIR.fullmatch(hub.name) and real.is_relative_to(hub / "blobs")
    if not in_blobs and not real.is_relative_to(root) and not _is_viewed(file, real):
        raise ModelError(
            f"{named(file)} is a link that leads out of the model's directory; "
            "put the file itself there, or link the directory as a whole"
        )
    return real


def _is_viewed(file: Path, real: Path) -> bool:
    """Whether a link to a GGUF file was made by a node. A model's author could only name another GGUF file."""
    if file.suffix != ".gguf":
        return False
    try:
        descriptor = os.open(file.parent / VIEW_FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            links = json.loads(stream.read(_MAX_VIEW_BYTES)).get("links")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return isinstance(links, dict) and links.get(file.name) == str(real)


def _require_regular(file: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}
        raise ModelError(f"{named(file)} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a regular file")


def _refuse_pointer(file: Path, stream: BinaryIO) -> None:
    """Raises ModelError if the file is a Git-LFS pointer; the stream is at its start before and after."""
    if _read(file, stream, len(_LFS_POINTER)) == _LFS_POINTER:
        raise ModelError(
            f"{named(file)} is a Git LFS pointer, not the file itself: run git lfs pull in the model's directory, or "
            "download the model again"
        )
    stream.seek(0)


def _read(file: Path, stream: BinaryIO, num_bytes: int) -> bytes:
    try:
        return stream.read(num_bytes)
    except OSError as exc:
        raise ModelError(f"{named(file)} cannot be read: {_reason(exc)}") from exc


def _reason(exc: OSError | ValueError) -> str:
    """The reason of an error, without the path that str(exc) contains."""
    if isinstance(exc, OSError):
        return "its links form a loop" if exc.errno == errno.ELOOP else exc.strerror or type(exc).__name__
    return "its name is not a valid file name"
