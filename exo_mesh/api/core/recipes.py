"""Recipes of running answers: the data, as JSON bytes, from which any peer can make the reply to an answer's events."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from exo_mesh.api.core.preparing import PreparedChoice, PreparedRequest
from exo_mesh.domain.bounded_json import MAX_VALUES, decode_bounded
from exo_mesh.domain.request import GenerateRequest
from exo_mesh.errors import TransportError
from exo_mesh.text.output.formats import PLAIN
from exo_mesh.text.output.tools import Tool
from exo_mesh.text.tokenizer import TextModel

DialectName = Literal["chat", "completion", "message", "ollama_chat", "ollama_generate", "response"]
"""The kinds of replies; a peer that does not know one cannot make the reply."""


class RecipeTool(msgspec.Struct):
    """A tool that the model may call."""

    name: str
    description: str
    parameters: dict[str, Any]


class RecipeChoice(msgspec.Struct):
    """One answer. prompt, prompt_ids: the prompt's text and ids, or empty unless the client wants them in the reply."""

    request_id: str
    num_prompt: int
    prompt: str = ""
    prompt_ids: list[int] = []


class StreamRecipe(msgspec.Struct):
    """The parts of a PreparedRequest that a reply needs, and how the client wants it. has_format: the answer uses the
    model's output format, as in a conversation. The last fields are those of one dialect each."""

    dialect: DialectName
    id: str
    model: str
    created: int
    choices: list[RecipeChoice]
    stops: list[str] = []
    tools: list[RecipeTool] = []
    has_format: bool = False
    parallel_calls: bool = True
    starts_in_reasoning: bool = False
    num_kept: int = 1
    num_drawn: int = 1
    include_usage: bool | None = None
    continuous_usage: bool | None = None
    names_tier: bool = False
    shows_logprobs: bool = False
    shows_timings: bool = False
    tier: str = ""
    """Of the reply; a peer of an older version only knows names_tier, which stands for "default"."""
    hides_thinking: bool = False
    repeated: dict[str, Any] = {}
    """Of a response: the fields that repeat the request."""
    tool_names: dict[str, tuple[str, str, bool]] = {}
    """Of a response: (name, namespace, whether it is a custom tool) by the name for the model."""
    as_summary: bool = False
    shows_opaque: bool = False

    def prepared(self, text: TextModel) -> PreparedRequest:
        """The request, with only the fields that a reply needs."""
        return PreparedRequest(
            self.id,
            self.model,
            text,
            tuple(_choice(one) for one in self.choices),
            tuple(self.stops),
            output=text.output if self.has_format else PLAIN,
            tools=tuple(Tool(tool.name, tool.description, tool.parameters) for tool in self.tools),
            parallel_calls=self.parallel_calls,
            starts_in_reasoning=self.starts_in_reasoning,
            num_kept=self.num_kept,
            num_drawn=self.num_drawn,
        )


def recipe_of(dialect: DialectName, prepared: PreparedRequest, created: int) -> StreamRecipe:
    """The recipe with which another peer can make the same reply. Dialects add fields of their own to it."""
    return StreamRecipe(
        dialect,
        prepared.id,
        prepared.model,
        created,
        [
            RecipeChoice(
                choice.request.request_id,
                len(choice.request.prompt_ids),
                choice.prompt,
                list(choice.request.prompt_ids) if choice.prompt else [],
            )
            for choice in prepared.choices
        ],
        list(prepared.stops),
        [RecipeTool(tool.name, tool.description, tool.parameters) for tool in prepared.tools],
        prepared.output is not PLAIN,
        prepared.parallel_calls,
        prepared.starts_in_reasoning,
        prepared.num_kept,
        prepared.num_drawn,
    )


def read_recipe(data: bytes) -> StreamRecipe:
    """Decode a recipe. Raises TransportError if a peer of another version wrote it."""
    try:
        return decode_bounded(data, StreamRecipe, 5 * MAX_VALUES)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
        raise TransportError("a peer of another exo-mesh version runs this answer; read it from that peer") from exc


def _choice(recipe: RecipeChoice) -> PreparedChoice:
    ids = tuple(recipe.prompt_ids) or (0,) * max(1, recipe.num_prompt)
    return PreparedChoice(GenerateRequest(recipe.request_id, ids, 1), recipe.prompt)
