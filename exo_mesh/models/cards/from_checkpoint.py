"""Makes a card for a model that has none, from its configuration and the headers of its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from exo_mesh.domain.embedding import GENERATION
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.model_settings import quantization_of, text_config
from exo_mesh.models.cards.card_store import shipped_cards
from exo_mesh.models.cards.profile import TemplateFacts
from exo_mesh.models.cards.toml_card import Capability, Task, TomlCard


def card_from_checkpoint(
    model: ModelCard, config: Mapping[str, Any], template: TemplateFacts | None = None
) -> TomlCard:
    """Makes a custom card for a model, by its name in the mesh. config: the model's config.json, from a stranger.

    template: facts from the model's chat template, None if it has none. Nothing in these files can turn remote code on.
    """
    return TomlCard(
        id=model.name,
        family=_family(model.architecture),
        architecture=_word(model.architecture),
        quantization=_word(model.quantization or quantization_of(config)),
        n_layers=model.num_layers,
        hidden_size=model.hidden_size,
        kv_heads=_count(text_config(config).get("num_key_value_heads")),
        context_length=model.context_length,
        storage_size=model.total_bytes,
        disk_size=model.disk_bytes or None,
        source=f"config.json and headers of {model.name}",
        tasks=_tasks(model),
        capabilities=_capabilities(config, template),
        is_custom=True,
    )


def _tasks(model: ModelCard) -> tuple[Task, ...]:
    """Text generation for every language model, as shipped cards have it; else what the files show."""
    return ("text_generation",) if GENERATION in model.tasks else cast(tuple[Task, ...], model.tasks)


def _family(architecture: str) -> str | None:
    """The family of the shipped cards with this architecture, else the architecture itself."""
    known = {card.architecture: card.family for card in shipped_cards()}
    return known.get(architecture) or _word(architecture)


def _capabilities(config: Mapping[str, Any], template: TemplateFacts | None) -> tuple[Capability, ...]:
    facts = template or TemplateFacts()
    found: dict[Capability, bool] = {
        "text": True,
        "vision": isinstance(config.get("vision_config"), dict),
        "audio": isinstance(config.get("audio_config"), dict),
        "thinking": facts.thinks,
        "thinking_toggle": facts.toggle,
        "tools": facts.tools,
    }
    return tuple(name for name, is_given in found.items() if is_given)


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][\w.+\-]{0,63}", value, re.ASCII) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None
