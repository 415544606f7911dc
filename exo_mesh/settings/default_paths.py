"""The default URL of a node's API, and the directories of running nodes and of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from exo_mesh.settings.config import Settings

DEFAULT_API_URL = "http://127.0.0.1:52415"


def own_nodes_dir() -> Path:
    """The folder of this user in which running nodes name their homes, so that a command finds them."""
    import platformdirs

    return platformdirs.user_state_path("exo-mesh", appauthor=False) / "nodes"


def models_dirs(settings: Settings, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The named directories, `models` in the home, and the Hugging Face cache."""
    hub = environ.get("HF_HUB_CACHE") or Path(environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    return (*settings.models_dirs, settings.home / "models", Path(hub).expanduser())
