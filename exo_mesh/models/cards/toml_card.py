"""Reads and writes a card as a TOML file. docs/reference/cards.md describes each field. Pure functions."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from exo_mesh.base.printable import UNPRINTABLE, quoted
from exo_mesh.domain.model import CardRules
from exo_mesh.domain.view import MAX_CARD_BYTES
from exo_mesh.errors import ModelError
from exo_mesh.weights.model_files import one_line, shown

MAX_ALIASES = 16
MAX_EXCLUDED = 64
MAX_CARDS_PER_FILE = 256

_WORD = r"[A-Za-z0-9][A-Za-z0-9_.+\-]*"

Word = Annotated[str, msgspec.Meta(pattern=rf"^{_WORD}\Z", max_length=64)]
Line = Annotated[str, msgspec.Meta(pattern=rf"^[^{UNPRINTABLE}]*\Z", max_length=200)]
Repo = Annotated[str, msgspec.Meta(pattern=rf"^{_WORD}(/{_WORD})?(@{_WORD})?\Z", max_length=200)]
"""A model by its hub id, followed by @REVISION unless the revision is main."""

Tag = Annotated[str, msgspec.Meta(pattern=rf"^{_WORD}(:{_WORD})?\Z", max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NumBytes = Annotated[int, msgspec.Meta(ge=1, le=2**60)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

Task = Literal["text_generation", "embeddings", "rerank", "image_generation", "drafting"]
Capability = Literal["text", "vision", "audio", "thinking", "thinking_toggle", "tools", "embedding"]
ThinkingFormat = Literal["none", "token_delimited", "channel_delimited"]
Effort = Literal["none", "minimal", "low", "medium", "high"]
PromptRenderer = Literal["tokenizer", "gemma4", "dsml"]
OutputParser = Literal["generic", "gemma4", "gpt_oss", "deepseek_v32"]
ToolCallFormat = Literal["generic", "gemma4", "gpt_oss", "dsml"]


class CardSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table of a card. Each field is optional; None means that the card does not say."""


class VisionSection(CardSection, frozen=True, kw_only=True):
    """How images are put into the prompt."""

    image_token_id: TokenId | None = None
    boi_token_id: TokenId | None = None
    eoi_token_id: TokenId | None = None
    model_type: Word | None = None
    weights_repo: Repo | None = None
    processor_repo: Repo | None = None


class ReasoningSection(CardSection, frozen=True, kw_only=True):
    """How the model thinks before it answers."""

    supports_toggle: bool | None = None
    supports_budget: bool | None = None
    format: ThinkingFormat | None = None
    default_effort: Effort | None = None
    disabled_effort: Effort | None = None


class ModalitiesSection(CardSection, frozen=True, kw_only=True):
    """The inputs besides text that the model accepts."""

    supports_native_multimodal: bool | None = None
    supports_audio_input: bool | None = None


class ToolingSection(CardSection, frozen=True, kw_only=True):
    """How the model calls tools."""

    supports_tool_calling: bool | None = None
    tool_call_format: ToolCallFormat | None = None
    builtin_tools: tuple[Word, ...] = ()


class RuntimeSection(CardSection, frozen=True, kw_only=True):
    """How an engine must run the model."""

    prompt_renderer: PromptRenderer | None = None
    output_parser: OutputParser | None = None
    metal_fast_synch: bool | None = None
    mtp_heads: Count | None = None
    mtp_max_depth: Count | None = None
    mtp_sidecar_repo: Repo | None = None
    mtp_norm_convention: Word | None = None
    mtp_concat_order: Word | None = None
    assistant_model_repo: Repo | None = None
    speculative_multi_node: bool | None = None
    served_spec_type: Literal["draft_mtp", "draft_eagle3", "draft_simple", "ngram"] | None = None
    served_spec_n_max: Count | None = None
    served_spec_draft_repo: Repo | None = None
    served_spec_draft_file: Line | None = None


class PlacementSection(CardSection, frozen=True, kw_only=True):
    """Which machines may run the model."""

    compatible_backends: tuple[Word, ...] = ()
    backend_preference: tuple[Word, ...] = ()
    min_vram_gib: Annotated[float, msgspec.Meta(gt=0, le=2**20)] | None = None
    max_context_tokens: Count | None = None
    excluded_peers: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MAX_EXCLUDED)] = ()

    @property
    def rules(self) -> CardRules:
        """The same as placement uses it."""
        least = round((self.min_vram_gib or 0) * 2**30)
        limits = self.max_context_tokens, self.excluded_peers
        return CardRules(self.compatible_backends, self.backend_preference, least, *limits)


class TomlCard(CardSection, frozen=True, kw_only=True):
    """The description of one model. id: its hub id. architecture: `model_type` of its config.json.

    A figure without a source is None: it is read from the headers of the files when the model is used. source: where
    the figures come from. storage_size: bytes of all weights. disk_size: bytes of those that stay on disk.
    parameters_billions: as the publisher rounds them, where the id does not say it; people see an estimate of the size
    from it, and nothing is planned with it.
    """

    id: Repo
    family: Word | None = None
    architecture: Word | None = None
    quantization: Word | None = None
    base_model: Repo | None = None
    aliases: Annotated[tuple[Tag, ...], msgspec.Meta(max_length=MAX_ALIASES)] = ()
    n_layers: Count | None = None
    hidden_size: Count | None = None
    kv_heads: Count | None = None
    context_length: Count | None = None
    storage_size: NumBytes | None = None
    disk_size: NumBytes | None = None
    parameters_billions: Annotated[float, msgspec.Meta(gt=0, le=2**20)] | None = None
    source: Line | None = None
    tasks: tuple[Task, ...] = ("text_generation",)
    capabilities: tuple[Capability, ...] = ("text",)
    supports_tensor: bool | None = None
    trust_remote_code: bool = False
    is_custom: bool = False
    vision: VisionSection | None = None
    reasoning: ReasoningSection | None = None
    modalities: ModalitiesSection | None = None
    tooling: ToolingSection | None = None
    runtime: RuntimeSection | None = None
    placement: PlacementSection | None = None

    @property
    def figures(self) -> dict[str, int]:
        """The numbers that the card gives, by field."""
        given = {name: getattr(self, name) for name in FIGURES}
        return {name: value for name, value in given.items() if value is not None}


FIGURES = ("n_layers", "hidden_size", "kv_heads", "context_length", "storage_size", "disk_size")
"""Fields whose values need the field `source`."""


def read_cards(text: str, file: str) -> list[TomlCard]:
    """Reads the cards in a TOML file: one card if the file has an `id`, else those in `[[cards]]`, each on top of
    `[defaults]`.

    file: its name for errors. Raises ModelError that names the file, the card and the field.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise ModelError(f"{file} is not valid TOML: {one_line(str(exc))}") from exc
    cards = [_read_card(table, file, where) for table, where in _tables(document, file)]
    seen: dict[str, str] = {}
    for card in cards:
        for name in {card.id, *card.aliases}:
            if seen.setdefault(name.lower(), card.id) != card.id:
                raise ModelError(f"{file}: {name} is a name of both {seen[name.lower()]} and {card.id}")
    return cards


def read_card_text(text: str, file: str) -> TomlCard:
    """Reads a text with exactly one card. Raises ModelError, also if the text is longer than MAX_CARD_BYTES."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_CARD_BYTES:
        raise ModelError(f"{file} is longer than the limit of {MAX_CARD_BYTES} bytes for a card")
    cards = read_cards(text, file)
    if len(cards) != 1:
        raise ModelError(f"{file} has {len(cards)} cards; one is expected")
    return cards[0]


def card_to_toml(card: TomlCard) -> str:
    """Writes the card as the text of a TOML file of its own; fields with default values are omitted."""
    values: dict[str, Any] = msgspec.to_builtins(card)
    lines = [f"{name} = {_toml(value)}" for name, value in values.items() if not isinstance(value, dict)]
    for name, section in values.items():
        if isinstance(section, dict) and section:
            lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def _tables(document: Mapping[str, Any], file: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields each card of a file as a table, and the words by which errors name the card."""
    if "cards" not in document and "defaults" not in document:
        yield dict(document), ""
        return
    if unknown := sorted(document.keys() - {"cards", "defaults"}):
        extra = quoted(unknown[0], 64)
        raise ModelError(f"{file}: unknown field {extra} beside [[cards]]; [defaults] has what all cards share")
    cards, defaults = document.get("cards"), document.get("defaults", {})
    if not isinstance(cards, list) or not isinstance(defaults, dict) or len(cards) > MAX_CARDS_PER_FILE:
        raise ModelError(
            f"{file}: `cards` must be a list of at most {MAX_CARDS_PER_FILE} tables, and `defaults` a table"
        )
    for number, table in enumerate(cards):
        if not isinstance(table, dict):
            raise ModelError(f"{file}: cards[{number}] is not a table")
        name = table.get("id")
        yield {**defaults, **table}, f" {name}:" if isinstance(name, str) else f" cards[{number}]:"


def _read_card(table: dict[str, Any], file: str, where: str) -> TomlCard:
    try:
        card = msgspec.convert(table, TomlCard)
    except msgspec.ValidationError as exc:
        raise ModelError(f"{file}:{where} {_field_error(str(exc))}") from exc
    if card.figures and card.source is None:
        field = next(iter(card.figures))
        raise ModelError(f"{file}:{where} {field}: a figure needs a source; add the field `source`, or remove {field}")
    return card


def _field_error(message: str) -> str:
    """Rewrites an error of msgspec, which is like: Expected `int`, got `str` - at `$.n_layers`; or: Object contains
    unknown field `x` - at `$.a`."""
    text, _, place = message.replace(" | null", "").partition(" - at ")
    path = place.strip("`").removeprefix("$").removeprefix(".")
    for words, sentence in (
        ("Object contains unknown field `", "there is no such field"),
        ("Object missing required field `", "this field is required"),
    ):
        if text.startswith(words):
            field = text.removeprefix(words).removesuffix("`")
            return f"{one_line(f'{path}.{field}' if path else field)}: {sentence}"
    return f"{path or 'the card'}: {text[:1].lower()}{text[1:]}" if len(text) < 300 else shown(text)


def _toml(value: Any) -> str:
    """Formats a value of a card for TOML, which writes these types as JSON does."""
    return json.dumps(value, ensure_ascii=False)
