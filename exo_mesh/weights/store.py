"""Finds models on this machine: the shipped one, model directories, GGUF files, a Hugging Face cache."""

from __future__ import annotations

import difflib
import itertools
import json
import logging
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import ModelError, UnknownModelError
from exo_mesh.weights.card_child import read_card_within_limits
from exo_mesh.weights.fetched import MANIFEST_FILE, with_remedy
from exo_mesh.weights.gguf_table import is_model_file, without_shard
from exo_mesh.weights.gguf_views import (
    GgufSource,
    drop_views,
    ensure_view,
    gguf_sources,
    has_only_gguf,
    loose_sources,
    stamp_of,
)
from exo_mesh.weights.model_files import HUB_DIR, exists, label, one_line, read_model_file
from exo_mesh.weights.names import MODEL_NAME, usable_name

SHIPPED = "exo-mesh-demo"

MAX_MODELS = 1024
"""Most models of one machine. Every peer keeps a card of each."""

MAX_ENTRIES = 10_000
"""Most files and directories that are visited in one directory."""

RETRY_S = 60.0
"""Seconds until a model whose files could not be read is read again, though they have not changed."""

_MAX_REF_BYTES = 200
_ODD_NAME = "its name has other characters than letters, digits and . _ - + @, so no request can use it; rename it"
_OF_MODELS = (".json", ".jinja", ".safetensors", ".gguf")

_log = logging.getLogger(__name__)


class Found(msgspec.Struct, frozen=True):
    """The models found on the disk at one time. One real directory is one model: `models` has it by its first name,
    `others` has the first name by each other name. sources: the GGUF files of the directories that are made from them
    on first use. misnamed: why a directory without a usable name cannot be used, by
    printable name."""

    models: dict[str, Path] = msgspec.field(default_factory=dict)
    others: dict[str, str] = msgspec.field(default_factory=dict)
    sources: dict[Path, GgufSource] = msgspec.field(default_factory=dict)
    misnamed: dict[str, str] = msgspec.field(default_factory=dict)

    def origin_of(self, name: str) -> Path | GgufSource:
        """Where the files of one of `models` lie."""
        return self.sources.get(self.models[name], self.models[name])

    def first_name(self, name: str) -> str:
        return self.others.get(name, name)


class _Read(msgspec.Struct, frozen=True):
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

    def __init__(
        self,
        models_dirs: Sequence[Path],
        clock: Clock = monotonic,
        *,
        views_dir: Path | None = None,
        check: Callable[[Path], None] = lambda model_dir: None,
    ) -> None:
        """views_dir: where the directories of GGUF models are made; without it, GGUF files are no models. check: raises
        ModelError for a model that has a card, but whose other files cannot be used."""
        self._check = check
        self._models_dirs = tuple(models_dirs)
        self._views_dir = views_dir
        self._clock = clock
        self._read: dict[Path, _Read] = {}
        self._turn = threading.Lock()

    def names(self) -> list[str]:
        """All models found, sorted. A directory that cannot be read counts as empty."""
        return sorted(self.found().models)

    def find(self, name: str) -> Path:
        """Directory of a model. No name leads out of the known directories. Raises UnknownModelError, with similar
        names, and ModelError if the model's directory has a name that no model may have, or a GGUF model cannot be
        used."""
        _, model_dir, source = self._find(name)
        if source is not None:
            with self._turn:
                ensure_view(model_dir, source)
        return model_dir

    def card(self, name: str) -> ModelCard:
        """The card of a model, by its first name; read again only if one of its files has changed.

        Raises as `find`, and ModelError in a sentence without paths if the model cannot be used.
        """
        return self.card_at(*self._find(name))

    def card_at(self, name: str, model_dir: Path, source: GgufSource | None = None) -> ModelCard:
        """The card of one of `found().models`; source: its entry in `found().sources`, if there is one. Raises
        ModelError and nothing else, whatever is in the directory."""
        known = self._known(name, model_dir, source)
        if known is None:
            with self._turn:  # one at a time: reading several at once would only take more memory
                known = self._known(name, model_dir, source) or self._read_anew(name, model_dir, source)
        if known.card is None:
            raise ModelError(known.reason)
        return known.card

    def name_at(self, path: Path) -> str:
        """The name of the model whose directory, or only GGUF file or first shard, is `path`. Raises UnknownModelError
        if no model has it, or if the directory has several GGUF models; ModelError if its name cannot be used."""
        try:
            real = os.path.realpath(path)
        except ValueError:
            real = ""
        found = self.found()
        inside: dict[Path, str] = {}
        for name, model_dir in found.models.items():
            source = found.sources.get(model_dir)
            if os.path.realpath(model_dir if source is None else source.files[0]) == real:
                return name
            if source is not None and os.path.realpath(source.directory) == real:
                inside.setdefault(source.files[0], name)
        names = list(inside.values())
        if len(names) == 1:
            return names[0]
        if names:
            text = f"{one_line(str(path))} has {len(names)} models: {', '.join(names[:8])}; name one of them"
            raise UnknownModelError(text, param="model")
        if (name := without_shard(path.name)) in found.misnamed:
            raise ModelError(f"{name}: {found.misnamed[name]}")
        folder = shlex.quote(str(path.parent if path.suffix == ".gguf" else path))
        raise UnknownModelError(
            f"{one_line(str(path))} is not below a models directory of the node that runs: restart that node with "
            f"--models-dir {one_line(folder)}; then `exo-mesh list` shows the name of the model",
            param="model",
        )

    def found(self) -> Found:
        """Search the disk: the shipped model cannot be hidden, and earlier directories win over later ones."""
        found = Found()
        real_dirs: dict[str, str] = {}
        everything = itertools.islice(self._everything(), MAX_MODELS)
        # a model whose own name can be used keeps it, wherever one lies whose name has to change
        for given, model_dir, source in sorted(everything, key=lambda one: usable_name(one[0]) != one[0]):
            name = usable_name(given)
            if not MODEL_NAME.fullmatch(name):
                found.misnamed.setdefault(one_line(given), _ODD_NAME)
            elif name != given and name in found.models and found.origin_of(name) != (source or model_dir):
                found.misnamed.setdefault(one_line(given), f"its name would be {name}, as that of another; rename it")
            elif name not in found.models and name not in found.others:
                first = real_dirs.setdefault(os.path.realpath(model_dir), name)
                if first == name:
                    found.models[name] = model_dir
                    if source is not None:
                        found.sources[model_dir] = source
                else:
                    found.others[name] = first
        return found

    def forget(self, found: Found) -> None:
        """Drop the kept cards of models that are no longer there."""
        for model_dir in self._read.keys() - set(found.models.values()):
            self._read.pop(model_dir, None)
        if self._views_dir is not None:
            drop_views(self._views_dir, set(found.sources))

    def _everything(self) -> Iterator[tuple[str, Path, GgufSource | None]]:
        """(name, directory, GGUF files that the directory is made from)."""
        shipped = resources.files("exo_mesh.weights") / "shipped" / SHIPPED
        if isinstance(shipped, Path) and (shipped / "config.json").is_file():
            yield SHIPPED, shipped, None
        for models_dir in self._models_dirs:
            for name, found in _models_in(models_dir):
                if isinstance(found, Path):
                    yield name, found, None
                elif self._views_dir is not None:
                    yield name, self._views_dir / usable_name(name).replace("/", "--"), found

    def _find(self, name: str) -> tuple[str, Path, GgufSource | None]:
        """(first name, directory, GGUF files that it is made from)."""
        found = self.found()
        first = found.first_name(name)
        if first in found.models:
            return first, found.models[first], found.sources.get(found.models[first])
        if name in found.misnamed:
            raise ModelError(f"{name}: {found.misnamed[name]}")
        near = difflib.get_close_matches(name[:200], found.models, n=3, cutoff=0.4)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise UnknownModelError(f"no model {json.dumps(name[:200])} on this machine{hint}", param="model")

    def _known(self, name: str, model_dir: Path, source: GgufSource | None) -> _Read | None:
        kept = self._read.get(model_dir)
        if kept is None or kept.name != name or (kept.retry_at is not None and self._clock() >= kept.retry_at):
            return None
        return kept if kept.stamp == (_stamp(model_dir) if source is None else stamp_of(source)) else None

    def _read_anew(self, name: str, model_dir: Path, source: GgufSource | None) -> _Read:
        stamp = _stamp(model_dir) if source is None else stamp_of(source)
        read = _Read(name, stamp, None, stamp) if isinstance(stamp, str) else self._try(name, model_dir, source, stamp)
        self._read[model_dir] = read
        return read

    def _try(self, name: str, model_dir: Path, source: GgufSource | None, stamp: object) -> _Read:
        """Read a card. A model's files may raise anything, and a lack of memory must not end the node."""
        soon = self._clock() + RETRY_S
        try:
            if source is not None:
                ensure_view(model_dir, source)
            card = read_card_within_limits(model_dir, name)
            self._check(model_dir)
            return _Read(name, stamp, card)
        except ModelError as exc:
            passing = isinstance(exc.__cause__, OSError)
            reason = one_line(str(exc))
            if exists(model_dir / MANIFEST_FILE):
                reason = with_remedy(reason, name)
            return _Read(name, stamp, None, reason, soon if passing else None)
        except Exception as exc:  # noqa: BLE001 - one model must not keep a node from its others
            _log.debug("reading %s failed", model_dir, exc_info=True)
            return _Read(name, stamp, None, f"{name}: reading its files failed ({type(exc).__name__})", soon)


def model_dir_of(text: str, views_dir: Path | None = None) -> Path:
    """The directory of the model that a local command names: by its path, or the shipped one by its name. The directory
    of a GGUF file is made in views_dir. Raises UnknownModelError, and ModelError for a GGUF file that cannot be
    used."""
    if not text.startswith(("/", "./", "../", "~")):
        return ModelStore(()).find(text)
    path = Path(text).expanduser().absolute()
    if views_dir is not None and is_model_file(path.name) and path.is_file():
        ensure_view(views_dir / without_shard(path.name), GgufSource(path.parent, path.name))
        return views_dir / without_shard(path.name)
    if not exists(path / "config.json"):
        raise UnknownModelError(f"{path} is not a model directory: it has no config.json", param="model")
    return path


def _models_in(models_dir: Path) -> Iterator[tuple[str, Path | GgufSource]]:
    """`<name>`, `<org>/<name>` and `models--org--name/snapshots/<rev>` under one models directory, or the directory
    itself if it is a model. GGUF models by their files, which may be in the directory itself, too."""
    if exists(models_dir / "config.json") and exists(models_dir / "tokenizer.json") and not has_only_gguf(models_dir):
        yield label(models_dir), models_dir
    yield from loose_sources(models_dir)
    for entry in _subdirectories(models_dir):
        if _is_gguf_dir(entry):
            yield from gguf_sources(entry, entry.name)
        elif exists(entry / "config.json"):
            yield entry.name, entry
        elif HUB_DIR.fullmatch(entry.name):
            snapshot = _newest_snapshot(entry)
            if snapshot is not None:
                yield from (
                    gguf_sources(snapshot, label(snapshot))
                    if has_only_gguf(snapshot)
                    else ((label(snapshot), snapshot),)
                )
        else:
            for child in _subdirectories(entry):
                name = f"{entry.name}/{child.name}"
                if _is_gguf_dir(child):
                    yield from gguf_sources(child, name)
                elif exists(child / "config.json"):
                    yield name, child


def _is_gguf_dir(directory: Path) -> bool:
    """Whether a directory has only GGUF weights that were not fetched by a node: a fetched model has its texts."""
    return not exists(directory / MANIFEST_FILE) and has_only_gguf(directory)


def _newest_snapshot(hub_dir: Path) -> Path | None:
    """The snapshot that refs/main names, else the newest one, of a model in a Hugging Face cache."""
    snapshots = [
        path for path in _subdirectories(hub_dir / "snapshots") if exists(path / "config.json") or has_only_gguf(path)
    ]
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
