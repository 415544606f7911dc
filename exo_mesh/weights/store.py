"""Find models on this machine: the shipped one, model directories, a Hugging Face cache, explicit paths."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import UnknownModelError
from exo_mesh.weights.card import TEXT_FILES, read_card

SHIPPED = "exo-mesh-demo"

_NAME = re.compile(r"[A-Za-z0-9][\w.\-+]*(/[A-Za-z0-9][\w.\-+]*)?")
_HUB_DIR = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")


class ModelStore:
    """Names of models and where they lie. A name is a hub id (`org/name`), a directory name, or `exo-mesh-demo`.

    Looks at the disk on every call: models may come and go while a node runs. Cards are kept until their files change.
    """

    def __init__(self, models_dirs: Sequence[Path]) -> None:
        self._models_dirs = tuple(models_dirs)
        self._cards: dict[Path, tuple[tuple[int, ...], ModelCard]] = {}

    def names(self) -> list[str]:
        """All models found, sorted. Directories that cannot be read are as good as empty."""
        return sorted(self._scan())

    def find(self, name: str, *, allow_paths: bool = False) -> Path:
        """Directory of a model. With allow_paths, `name` may be an absolute path or begin with `./`, `../` or `~`.

        Raises UnknownModelError, with near names. Without allow_paths no name leads out of the known directories.
        """
        if allow_paths and name.startswith(("/", "./", "../", "~")):
            path = Path(name).expanduser().resolve()
            if (path / "config.json").is_file():
                return path
            raise UnknownModelError(f"{path} is not a model directory: it has no config.json", param="model")
        models = self._scan()
        if _NAME.fullmatch(name) and name in models:
            return models[name]
        near = difflib.get_close_matches(name[:200], models, n=3, cutoff=0.4)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise UnknownModelError(f"no model {name[:200]!r} on this machine{hint}", param="model")

    def card(self, name: str, *, allow_paths: bool = False) -> ModelCard:
        """The card of a model, read again only if one of its files has changed. Raises as `find` and `read_card`."""
        model_dir = self.find(name, allow_paths=allow_paths)
        stamp = _stamp(model_dir)
        kept = self._cards.get(model_dir)
        if kept is None or kept[0] != stamp or kept[1].name != name:
            kept = self._cards[model_dir] = (stamp, read_card(model_dir, name))
        return kept[1]

    def text_files(self, name: str, *, allow_paths: bool = False) -> list[Path]:
        """Those of TEXT_FILES that the model has."""
        model_dir = self.find(name, allow_paths=allow_paths)
        return [model_dir / file for file in TEXT_FILES if (model_dir / file).is_file()]

    def _scan(self) -> dict[str, Path]:
        """{name: directory}; the shipped model cannot be hidden, and earlier directories win over later ones."""
        found: dict[str, Path] = {}
        shipped = resources.files("exo_mesh.weights") / "shipped" / SHIPPED
        if isinstance(shipped, Path) and (shipped / "config.json").is_file():
            found[SHIPPED] = shipped
        for models_dir in self._models_dirs:
            for name, path in _models_in(models_dir):
                if _NAME.fullmatch(name):
                    found.setdefault(name, path)
        return found


def _models_in(models_dir: Path) -> Iterator[tuple[str, Path]]:
    """`<name>`, `<org>/<name>` and `models--org--name/snapshots/<rev>` under one models directory."""
    for entry in _subdirectories(models_dir):
        hub = _HUB_DIR.fullmatch(entry.name)
        if (entry / "config.json").is_file():
            yield entry.name, entry
        elif hub:
            snapshot = _newest_snapshot(entry)
            if snapshot is not None:
                yield f"{hub['org']}/{hub['name']}", snapshot
        else:
            for child in _subdirectories(entry):
                if (child / "config.json").is_file():
                    yield f"{entry.name}/{child.name}", child


def _newest_snapshot(hub_dir: Path) -> Path | None:
    """The snapshot that refs/main names, else the one changed last, of a model in a Hugging Face cache."""
    snapshots = [path for path in _subdirectories(hub_dir / "snapshots") if (path / "config.json").is_file()]
    try:
        main = hub_dir / "snapshots" / (hub_dir / "refs" / "main").read_text().strip()
    except OSError:
        main = None
    if main in snapshots:
        return main
    return max(snapshots, key=lambda path: path.stat().st_mtime_ns, default=None)


def _subdirectories(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _stamp(model_dir: Path) -> tuple[int, ...]:
    """Changes whenever a file of the model is written, added or removed."""
    files = sorted(
        path for path in model_dir.iterdir() if path.suffix in {".json", ".jinja", ".safetensors"} and path.is_file()
    )
    return tuple(value for path in files for value in (path.stat().st_mtime_ns, path.stat().st_size))
