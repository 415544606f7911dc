"""The formats in which models write, and how to tell which one a model uses. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from exo_mesh.domain.grammar import GrammarSpec
from exo_mesh.text.output.families.table import FAMILIES
from exo_mesh.text.output.tools import Tool

_REASONING = (("<think>", "</think>"),)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model marks its thoughts and tool calls. Empty strings: it does not think, or it calls no tools."""

    name: str
    reasoning_start: str = ""
    reasoning_end: str = ""
    tool_family: str = ""

    def markers(self, *, has_tools: bool) -> frozenset[str]:
        """Special tokens that the parser must see as text, although they are no text for the reader of an answer."""
        found = {self.reasoning_start, self.reasoning_end} - {""}
        return frozenset(found | set(FAMILIES[self.tool_family].markers if has_tools and self.tool_family else ()))


PLAIN = OutputFormat("plain")


def format_of(template_source: str | None, architecture: str, special_tokens: Collection[str]) -> OutputFormat:
    """The format of a model. special_tokens: the tokens that its tokenizer adds to the vocabulary."""
    source = template_source or ""
    start, end = next((pair for pair in _REASONING if pair[1] in source or pair[1] in special_tokens), ("", ""))
    family = "hermes" if "<tool_call>" in source else ""
    name = family or ("thinks" if start else "plain")
    return OutputFormat(name, start, end, family)


def prompt_starts_reasoning(output: OutputFormat, prompt: str) -> bool:
    """Whether the prompt ends inside a thought: the template has written the start marker for the model."""
    start = output.reasoning_start
    return bool(start) and prompt.rstrip().endswith(start)


def tool_grammar(output: OutputFormat, tools: Sequence[Tool], choice: Any, parallel: bool) -> GrammarSpec | None:
    """A grammar that enforces a call, in the family's format; None if choice leaves the model free, or if the format
    cannot be enforced. choice: "none", "auto", "required", or the name of a tool."""
    return None


def after_reasoning(output: OutputFormat, spec: GrammarSpec, starts_in_reasoning: bool) -> GrammarSpec:
    """The grammar holds only for the answer: the model may think before it."""
    return spec
