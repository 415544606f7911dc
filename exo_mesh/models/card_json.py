"""Reads and writes model cards and surveys as JSON, as peers exchange them and nodes keep them."""

from __future__ import annotations

import json

import msgspec

from exo_mesh.base.printable import printable_values, quoted
from exo_mesh.domain.bounded_json import decode_bounded
from exo_mesh.domain.model import ModelCard
from exo_mesh.engine.contract import ModelSurvey
from exo_mesh.errors import ModelError

MAX_BYTES = 2**50
"""Upper bound of a layer's size, to reject impossible surveys."""


def card_to_json(card: ModelCard) -> bytes:
    return json.dumps(msgspec.to_builtins(card), separators=(",", ":")).encode()


def card_from_json(text: bytes) -> ModelCard:
    """Reads a card from a peer. Raises ModelError if it is not valid: placement computes with every field."""
    try:
        card = msgspec.convert(printable_values(decode_bounded(text)), ModelCard)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ModelError(f"a peer sent a model card that this version cannot read: {exc}") from exc
    sizes = (card.num_layers, card.hidden_size, card.vocab_size, card.context_length, *card.layer_bytes)
    kv_bytes = (card.kv_bytes_per_token, *card.kv_layer_bytes, *card.kv_fixed_bytes)
    if min(sizes) < 1 or min(card.embed_bytes, card.head_bytes, *kv_bytes, *card.table_bytes) < 0:
        raise ModelError(f"a peer sent a card of {quoted(card.name, 80)} with impossible sizes")
    return card


def survey_from_json(text: bytes, num_layers: int) -> ModelSurvey:
    """Reads a survey. Raises ModelError if it does not fit the model: placement computes with every field."""
    try:
        survey = msgspec.convert(printable_values(decode_bounded(text)), ModelSurvey)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ModelError(f"an engine returned a survey that this version cannot read: {exc}") from exc
    per_layer = (survey.layer_bytes, survey.kv_bytes_per_token, survey.kv_fixed_bytes)
    sizes = [survey.embed_bytes, survey.head_bytes, *(size for sizes in per_layer for size in sizes)]
    if any(len(values) not in (0, num_layers) for values in (*per_layer, survey.layer_kinds)):
        raise ModelError(f"an engine returned a survey with another number of layers than the model's {num_layers}")
    if not 0 <= min(sizes) <= max(sizes) < MAX_BYTES or (survey.layer_bytes and min(survey.layer_bytes) < 1):
        raise ModelError("an engine returned a survey with impossible sizes")
    if not set(survey.legal_cuts) <= set(range(num_layers)):
        raise ModelError(f"an engine returned illegal cuts of {num_layers} layers: {list(survey.legal_cuts[:8])}")
    return survey


def survey_to_json(survey: ModelSurvey) -> bytes:
    return msgspec.json.encode(survey)
