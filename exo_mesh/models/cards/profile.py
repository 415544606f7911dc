"""Resolves what a model can do, from its card, its architecture and its chat template. Pure."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from exo_mesh.models.cards.toml_card import (
    ModalitiesSection,
    OutputParser,
    PromptRenderer,
    ReasoningSection,
    RuntimeSection,
    ThinkingFormat,
    TomlCard,
    ToolCallFormat,
    ToolingSection,
)
from exo_mesh.text.template import ChatTemplate

T = TypeVar("T")

_WORD = re.compile(r"\b(enable_thinking|thinking|thinking_budget|reasoning_effort|tools)\b")
_THINKS = re.compile(r"</?think>|\[/?THINK\]|<\|channel\|>|\breasoning_content\b")


class TemplateFacts(msgspec.Struct, frozen=True):
    """What a chat template shows about a model."""

    tools: bool = False
    thinks: bool = False
    toggle: bool = False
    budget: bool = False
    effort: bool = False

    @classmethod
    def of(cls, source: str) -> TemplateFacts:
        """Guess from the text of a template, without running it; `tried` knows better."""
        words = set(_WORD.findall(source))
        toggle = bool(words & {"enable_thinking", "thinking"})
        effort, budget = "reasoning_effort" in words, "thinking_budget" in words
        thinks = toggle or effort or budget or _THINKS.search(source) is not None
        return cls("tools" in words, thinks, toggle, budget, effort)

    @classmethod
    def tried(cls, template: ChatTemplate) -> TemplateFacts:
        """The variables that a tried template reads, and whether it shows tools.

        Whether the model thinks is still read from the text: some templates only remove thoughts, so they write none.
        """
        tools = template.tool_use or template
        read = template.variables | tools.variables
        toggle = bool(read & {"enable_thinking", "thinking"})
        effort, budget = "reasoning_effort" in read, "thinking_budget" in read
        thinks = toggle or effort or budget or _THINKS.search(template.sources) is not None
        return cls("tools" in tools.variables and tools.traits.shows_tools, thinks, toggle, budget, effort)


class CapabilityProfile(msgspec.Struct, frozen=True):
    """What a model itself can do, independent of what this version serves."""

    family: str
    supports_thinking: bool = False
    supports_thinking_toggle: bool = False
    supports_thinking_budget: bool = False
    supports_thinking_effort: bool = False
    supports_image_input: bool = False
    supports_audio_input: bool = False
    supports_native_multimodal: bool = False
    supports_tool_calling: bool = False
    thinking_format: ThinkingFormat = "none"
    default_reasoning_effort: str | None = None
    disabled_reasoning_effort: str | None = None
    prompt_renderer: PromptRenderer = "tokenizer"
    output_parser: OutputParser = "generic"
    tool_call_format: ToolCallFormat = "generic"
    builtin_tools: tuple[str, ...] = ()

    @property
    def input_modalities(self) -> tuple[str, ...]:
        given = {"text": True, "image": self.supports_image_input, "audio": self.supports_audio_input}
        return tuple(name for name, is_taken in given.items() if is_taken)

    def to_json(self) -> dict[str, Any]:
        """Returns the profile as GET /v1/models shows it."""
        return {
            "family": self.family,
            "thinking": {
                "supported": self.supports_thinking,
                "toggle": self.supports_thinking_toggle,
                "budget": self.supports_thinking_budget,
                "effort": self.supports_thinking_effort,
                "format": self.thinking_format,
                "default_effort": self.default_reasoning_effort,
                "disabled_effort": self.disabled_reasoning_effort,
            },
            "tools": {
                "supported": self.supports_tool_calling,
                "format": self.tool_call_format,
                "builtin": list(self.builtin_tools),
            },
            "modalities": {
                "input": list(self.input_modalities),
                "output": ["text"],
                "native": self.supports_native_multimodal,
            },
            "prompt_renderer": self.prompt_renderer,
            "output_parser": self.output_parser,
        }


def resolve_profile(architecture: str, card: TomlCard | None, template: TemplateFacts | None) -> CapabilityProfile:
    """Resolves a profile. The order is: a section of the card, the template, the card's capabilities, the architecture.

    template: None if the model has none, or it was not read yet.
    """
    reasoning = (card and card.reasoning) or ReasoningSection()
    modalities = (card and card.modalities) or ModalitiesSection()
    tooling = (card and card.tooling) or ToolingSection()
    runtime = (card and card.runtime) or RuntimeSection()
    can = set(card.capabilities if card else ())
    facts = template or TemplateFacts()
    renderer, parser, calls, thinking_format = _of_architecture(architecture)
    thinks = "thinking" in can or (facts.thinks if card is None else False)
    toggle = _first(reasoning.supports_toggle, "thinking_toggle" in can or (thinks and facts.toggle))
    format_ = _first(reasoning.format, thinking_format)
    return CapabilityProfile(
        family=_first(card.family if card else None, architecture),
        supports_thinking=thinks,
        supports_thinking_toggle=thinks and toggle,
        supports_thinking_budget=thinks and _first(reasoning.supports_budget, facts.budget),
        supports_thinking_effort=thinks and (facts.effort or reasoning.default_effort is not None),
        supports_image_input="vision" in can or bool(card and card.vision),
        supports_audio_input=_first(modalities.supports_audio_input, "audio" in can),
        supports_native_multimodal=_first(modalities.supports_native_multimodal, False),
        supports_tool_calling=_first(tooling.supports_tool_calling, facts.tools if template else "tools" in can),
        thinking_format=format_ if thinks else "none",
        default_reasoning_effort=reasoning.default_effort,
        disabled_reasoning_effort=_first(reasoning.disabled_effort, "none" if thinks and toggle else None),
        prompt_renderer=_first(runtime.prompt_renderer, renderer),
        output_parser=_first(runtime.output_parser, parser),
        tool_call_format=_first(tooling.tool_call_format, calls),
        builtin_tools=tooling.builtin_tools,
    )


def _of_architecture(architecture: str) -> tuple[PromptRenderer, OutputParser, ToolCallFormat, ThinkingFormat]:
    """The formats of an architecture's prompts, output, tool calls and thoughts, for a card that does not name them."""
    if architecture.startswith("gemma4"):
        return "gemma4", "gemma4", "gemma4", "channel_delimited"
    if architecture == "gpt_oss":
        return "tokenizer", "gpt_oss", "gpt_oss", "channel_delimited"
    if architecture == "deepseek_v32":
        return "dsml", "deepseek_v32", "dsml", "token_delimited"
    return "tokenizer", "generic", "generic", "token_delimited"


def _first(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value
