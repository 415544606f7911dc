"""The settings of whole-model engines, from the settings of the node and the cards of models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from exo_mesh.engine.registry import Registry
from exo_mesh.models.cards.toml_card import TomlCard
from exo_mesh.settings.config import Settings


def server_options(settings: Settings, registry: Registry) -> dict[str, dict[str, str]]:
    """The options of every whole-model engine, by engine: this node's settings for model servers, and what
    `--server-option` gives. An absent key means that nothing was set."""
    shared = {"stands_for": json.dumps(settings.stands_for)} if settings.stands_for else {}
    own: Mapping[str, dict[str, str]] = {"openai": _openai(settings), "rkllm": _rkllm(settings)}
    return {
        name: {**shared, **own.get(name, {}), **_given(settings, name)}
        for name, provider in registry.providers.items()
        if provider.kind == "whole-model"
    }


def _openai(settings: Settings) -> dict[str, str]:
    found = {"servers": ",".join(settings.openai_servers)} if settings.openai_servers else {}
    if settings.openai_key_file is not None:
        found["key_file"] = str(settings.openai_key_file)
    if settings.llama_server:
        found["binary"] = settings.llama_server
        found["models_dir"] = ",".join(map(str, (*settings.models_dirs, settings.home / "models")))
    return found


def _rkllm(settings: Settings) -> dict[str, str]:
    found = {"host": settings.rkllm_server_host} if settings.rkllm_server_host else {}
    if settings.rkllm_server_port:
        found["port"] = str(settings.rkllm_server_port)
    return found


def _given(settings: Settings, engine: str) -> dict[str, str]:
    """What `--server-option ENGINE.KEY=VALUE` gives for one engine."""
    begins = f"{engine}."
    return {key.removeprefix(begins): one for key, one in settings.server_options.items() if key.startswith(begins)}


def with_card(options: Mapping[str, str], card: TomlCard | None) -> dict[str, str]:
    """The options of an engine for one model: with what its card says of speculation, if the engine starts the server
    itself. Options that are set already win."""
    runtime = None if card is None else card.runtime
    if runtime is None or runtime.served_spec_type is None or "binary" not in options:
        return dict(options)
    found: dict[str, str] = {"spec_type": runtime.served_spec_type}
    if runtime.served_spec_n_max is not None:
        found["spec_n_max"] = str(runtime.served_spec_n_max)
    if runtime.served_spec_draft_repo and runtime.served_spec_draft_file:
        found["draft_model"] = _draft_file(options, runtime.served_spec_draft_repo, runtime.served_spec_draft_file)
    return {**found, **options}


def _draft_file(options: Mapping[str, str], repo: str, file: str) -> str:
    """Where the draft model is in the model directories; where it should be, if it is in none: the engine says so."""
    places = [Path(directory) / repo / file for directory in options.get("models_dir", "").split(",") if directory]
    return str(next((place for place in places if place.is_file()), places[-1] if places else Path(repo) / file))
