"""Finds models on this machine: the shipped one, model directories, a Hugging Face cache."""

from __future__ import annotations

import difflib
import itertools
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from exo_mesh.clock import Clock, monotonic
from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import ModelError, UnknownModelError
from exo_mesh.model_files import HUB_DIR, exists, label, one_line, read_model_file
from exo_mesh.weights.card_child import read_card_within_limits
from exo_mesh.weights.fetched import MANIFEST_FILE, with_remedy
from exo_mesh.weights.names import MODEL_NAME

SHIPPED = "exo-mesh-demo"

MAX_MODELS = 1024
"""Most models of one machine. Every peer keeps a card of each."""

MAX_ENTRIES = 10_000
"""Most files and directories that are visited in one directory."""

RETRY_S = 60.0
"""Seconds until a model whose files could not be read is read again, though they have not changed."""

_MAX_REF_BYTES = 200
_ODD_NAME = "the directory's name has other characters than letters, digits and . _ - + @, so no request can name it"
_OF_MODELS = (".json", ".jinja", ".safetensors")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """The models found on the disk at one time. One real directory is one model: `models` has it by its first name,
    `others` has the first name by each other name. misnamed: why a directory without a usable name cannot be used, by
    printable name."""

    models: dict[str, Path] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    misnamed: dict[str, str] = field(default_factory=dict)

    def first_name(self, name: str) -> str:
        return self.others.get(name, name)


@dataclass(frozen=True, slots=True)
class _Read:
    """The card of a model, or the reason why it has none, until its files change; retry_at: or until then."""

    name: str
    stamp: object
    card: ModelCard | None
    reason: str = ""
    retry_at: float | None = None


class ModelStore:
    """The models of this machine, by name. A name is a hub id (`org/name`), a directory name, or `exo-mesh-demo`.

    Reads the disk on every call: models may come and go while a node runs. Cards, and the reasons why a model has none,
    are kept until its files change. Safe to use from several threads.
    """

    def __init__(self, models_dirs: Sequence[Path], clock: Clock = monotonic) -> None:
        self._models_dirs = tuple(models_dirs)
        self._clock = clock
        self._read: dict[Path, _Read] = {}
        self._turn = threading.Lock()

    def names(self) -> list[str]:
        """All models found, sorted. A directory that cannot be read counts as empty."""
        return sorted(self.found().models)

    def find(self, name: str) -> Path:
        """Directory of a model. No name leads out of the known directories. Raises UnknownModelError, with similar
        names, and ModelError if the model's directory has a name that no model may have."""
        return self._find(name)[1]

    def card(self, name: str) -> ModelCard:
        """The card of a model, by its first name; read again only if one of its files has changed.

        Raises as `find`, and ModelError in a sentence without paths if the model cannot be used.
        """
        return self.card_at(*self._find(name))

    def card_at(self, name: str, model_dir: Path) -> ModelCard:
        """The card of one of `found().models`. Raises ModelError and nothing else, whatever is in the directory."""
        known = self._known(name, model_dir)
        if known is None:
            with self._turn:  # one at a time: reading several at once would only take more memory
                known = self._known(name, model_dir) or self._read_anew(name, model_dir)
        if known.card is None:
            raise ModelError(known.reason)
        return known.card

    def name_at(self, path: Path) -> str:
        """The name of the model whose directory is `path`. Raises UnknownModelError if it is not a known model
        directory."""
        try:
            real = os.path.realpath(path)
        except ValueError:
            real = ""
        for name, model_dir in self.found().models.items():
            if os.path.realpath(model_dir) == real:
                return name
        raise UnknownModelError(
            f"{one_line(str(path))} is not a model directory of this node; start the node with --models-dir and that "
            "directory, and use the name that `exo-mesh models` shows",
            param="model",
        )

    def found(self) -> Found:
        """Search the disk: the shipped model cannot be hidden, and earlier directories win over later ones."""
        found = Found()
        real_dirs: dict[str, str] = {}
        for name, model_dir in itertools.islice(self._everything(), MAX_MODELS):
            if not MODEL_NAME.fullmatch(name):
                found.misnamed.setdefault(one_line(name), _ODD_NAME)
            elif name not in found.models and name not in found.others:
                first = real_dirs.setdefault(os.path.realpath(model_dir), name)
                if first == name:
                    found.models[name] = model_dir
                else:
                    found.others[name] = first
        return found

    def forget(self, found: Found) -> None:
        """Drop the kept cards of models that are no longer there."""
        for model_dir in self._read.keys() - set(found.models.values()):
            self._read.pop(model_dir, None)

    def _everything(self) -> Iterator[tuple[str, Path]]:
        shipped = resources.files("exo_mesh.weights") / "shipped" / SHIPPED
        if isinstance(shipped, Path) and (shipped / "config.json").is_file():
            yield SHIPPED, shipped
        for models_dir in self._models_dirs:
            yield from _models_in(models_dir)

    def _find(self, name: str) -> tuple[str, Path]:
        """(first name, directory)."""
        found = self.found()
        first = found.first_name(name)
        if first in found.models:
            return first, found.models[first]
        if name in found.misnamed:
            raise ModelError(f"{name}: {found.misnamed[name]}")
        near = difflib.get_close_matches(name[:200], found.models, n=3, cutoff=0.4)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise UnknownModelError(f"no model {json.dumps(name[:200])} on this machine{hint}", param="model")

    def _known(self, name: str, model_dir: Path) -> _Read | None:
        kept = self._read.get(model_dir)
        if kept is None or kept.name != name or (kept.retry_at is not None and self._clock() >= kept.retry_at):
            return None
        return kept if kept.stamp == _stamp(model_dir) else None

    def _read_anew(self, name: str, model_dir: Path) -> _Read:
        stamp = _stamp(model_dir)
        read = _Read(name, stamp, None, stamp) if isinstance(stamp, str) else self._try(name, model_dir, stamp)
        self._read[model_dir] = read
        return read

    def _try(self, name: str, model_dir: Path, stamp: object) -> _Read:
        """Read a card. A model's files may raise anything, and a lack of memory must not end the node."""
        soon = self._clock() + RETRY_S
        try:
            return _Read(name, stamp, read_card_within_limits(model_dir, name))
        except ModelError as exc:
            passing = isinstance(exc.__cause__, OSError)
            reason = one_line(str(exc))
            if exists(model_dir / MANIFEST_FILE):
                reason = with_remedy(reason, name)
            return _Read(name, stamp, None, reason, soon if passing else None)
        except Exception as exc:  # noqa: BLE001 - one model must not keep a node from its others
            _log.debug("reading %s failed", model_dir, exc_info=True)
            return _Read(name, stamp, None, f"{name}: reading its files failed ({type(exc).__name__})", soon)


def model_dir_of(text: str) -> Path:
    """The directory of the model that a local command names: by its path, or the shipped one by its name. Raises
    UnknownModelError."""
    if not text.startswith(("/", "./", "../", "~")):
        return ModelStore(()).find(text)
    path = Path(text).expanduser().absolute()
    if not exists(path / "config.json"):
        raise UnknownModelError(f"{path} is not a model directory: it has no config.json", param="model")
    return path


def _models_in(models_dir: Path) -> Iterator[tuple[str, Path]]:
    """`<name>`, `<org>/<name>` and `models--org--name/snapshots/<rev>` under one models directory, or the directory
    itself if it is a model."""
    if exists(models_dir / "config.json") and exists(models_dir / "tokenizer.json"):
        yield label(models_dir), models_dir
    for entry in _subdirectories(models_dir):
        if exists(entry / "config.json"):
            yield entry.name, entry
        elif HUB_DIR.fullmatch(entry.name):
            snapshot = _newest_snapshot(entry)
            if snapshot is not None:
                yield label(snapshot), snapshot
        else:
            for child in _subdirectories(entry):
                if exists(child / "config.json"):
                    yield f"{entry.name}/{child.name}", child


def _newest_snapshot(hub_dir: Path) -> Path | None:
    """The snapshot that refs/main names, else the newest one, of a model in a Hugging Face cache."""
    snapshots = [path for path in _subdirectories(hub_dir / "snapshots") if exists(path / "config.json")]
    try:
        main = read_model_file(hub_dir / "refs" / "main", _MAX_REF_BYTES).decode(errors="replace").strip()
    except (OSError, ModelError):
        main = ""
    named = [path for path in snapshots if path.name == main]
    return named[0] if named else max(snapshots, key=_modified_ns, default=None)


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _subdirectories(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            found = [entry.name for entry in itertools.islice(entries, MAX_ENTRIES) if _is_directory(entry)]
    except OSError:
        return []
    return [directory / name for name in sorted(found)]


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return not entry.name.startswith(".") and entry.is_dir()
    except OSError:  # links that form a circle
        return False


def _stamp(model_dir: Path) -> object:
    """A value that changes whenever a file of the model is written, added or removed. A text is the reason why there is
    none."""
    try:
        with os.scandir(model_dir) as entries:
            files = list(itertools.islice(entries, MAX_ENTRIES + 1))
            if len(files) > MAX_ENTRIES:
                return f"{label(model_dir)}: the directory has more than {MAX_ENTRIES} files"
            return tuple(sorted((entry.name, *_state(entry)) for entry in files if entry.name.endswith(_OF_MODELS)))
    except OSError as exc:
        return f"{label(model_dir)}: the directory cannot be read: {exc.strerror or type(exc).__name__}"


def _state(entry: os.DirEntry[str]) -> tuple[int, int, int]:
    try:
        found = entry.stat()
    except OSError:  # a broken link
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_mode
