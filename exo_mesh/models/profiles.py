"""Caches the capability profiles of the mesh's models, so that listing models reads no file."""

from __future__ import annotations

import asyncio
from pathlib import Path

from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import ModelError, UnknownModelError
from exo_mesh.models.cards.card_store import CardStore
from exo_mesh.models.cards.profile import CapabilityProfile, TemplateFacts, resolve_profile
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.text_cache import TextCache
from exo_mesh.text.template import ChatTemplate, find_template
from exo_mesh.weights.model_files import read_json_if_there


class Profiles:
    """The cached profiles. Templates are kept by the digest of a model's text files, as long as the model exists."""

    def __init__(self, catalogue: Catalogue, shelf: CardStore, texts: TextCache) -> None:
        self._catalogue = catalogue
        self._shelf = shelf
        self._texts = texts
        self._facts: dict[str, TemplateFacts | None] = {}
        self._tried: set[str] = set()
        self._resolved: dict[str, tuple[tuple[str, ...], CapabilityProfile]] = {}
        self._resolved_from: tuple[object, object] = (None, None)

    def of(self, card: ModelCard) -> tuple[tuple[str, ...], CapabilityProfile]:
        """Returns (aliases, profile) of a model. The profile includes the chat template after the first `learn` that
        finds the text files here; for a peer's model that is after its first request on this node."""
        sources = (self._shelf.cards(), self._facts)
        if any(now is not before for now, before in zip(sources, self._resolved_from, strict=True)):
            self._resolved, self._resolved_from = {}, sources
        if card.name not in self._resolved:
            self._resolved[card.name] = self._resolve(card)
        return self._resolved[card.name]

    def _resolve(self, card: ModelCard) -> tuple[tuple[str, ...], CapabilityProfile]:
        written = self._shelf.card(card.name)
        aliases = () if written is None or written.id != card.name else written.aliases
        return aliases, resolve_profile(card.architecture, written, self._facts.get(card.text_digest))

    def note_tried(self, name: str, template: ChatTemplate) -> None:
        """Takes what a renderer has found about a model's template, in place of what its text suggests."""
        try:
            digest = self._catalogue.known_card(name).text_digest
        except UnknownModelError:  # its last peer has left meanwhile
            return
        if template.is_tried and digest not in self._tried:
            self._tried.add(digest)
            self._facts = {**self._facts, digest: TemplateFacts.tried(template)}

    async def learn(self) -> None:
        """Reads the templates of new models."""
        cards = [self._catalogue.known_card(name) for name in self._catalogue.names()]
        digests = {card.text_digest for card in cards}
        if not self._facts.keys() <= digests:
            self._facts = {digest: facts for digest, facts in self._facts.items() if digest in digests}
            self._tried &= digests
        new = [card for card in cards if card.text_digest not in self._facts]
        if new and (found := await asyncio.to_thread(self._read, new)):
            self._facts = {**found, **self._facts}  # a template may have been tried meanwhile

    def _read(self, cards: list[ModelCard]) -> dict[str, TemplateFacts | None]:
        """Blocking. Returns the templates' facts by text digest."""
        found: dict[str, TemplateFacts | None] = {}
        local = set(self._catalogue.local_architectures)
        for card in cards:
            directory = self._directory(card) if card.name in local else self._texts.fetched(card)
            if directory is not None:
                found[card.text_digest] = facts_in(directory)
        return found

    def _directory(self, card: ModelCard) -> Path | None:
        try:
            return self._catalogue.local_dir(card.name)
        except (UnknownModelError, ModelError):
            return None


def facts_in(directory: Path) -> TemplateFacts | None:
    """Returns what the template of a model shows; None if there is no readable template."""
    try:
        template = find_template(directory, read_json_if_there(directory / "tokenizer_config.json"))
    except (ModelError, OSError):
        return None
    return None if template is None else TemplateFacts.of(template.sources)
