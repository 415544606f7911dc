"""A client's request, independent of the API dialect: each dialect translates its bodies to a NeutralRequest. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from exo_mesh.api.core.keeping import ANYBODY, CacheWish
from exo_mesh.domain.request import GrammarSpec
from exo_mesh.text.output.tools import Tool

Role = Literal["developer", "system", "user", "assistant", "tool"]
Prompt = str | tuple[int, ...]
"""A prompt as text or as token ids."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the assistant made earlier in the conversation. arguments: the JSON object, decoded."""

    id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image as the client sent it, not decoded. where: its place in the client's body, for errors."""

    data: bytes = field(repr=False)
    where: str


class Turn(msgspec.Struct, frozen=True):
    """One message. where: its place in the client's body, for errors. tool_call_id: the call that this message of a
    tool answers."""

    role: Role
    text: str
    where: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    has_cache_marks: bool = False
    """Whether the client marks cache positions in the message; if so, no text of it may be moved."""
    parts: tuple[str | ImageInput, ...] = ()
    """Texts and images in the client's order, for a message with images; empty for any other. `text` is then the
    texts alone."""

    @property
    def images(self) -> tuple[ImageInput, ...]:
        return tuple(part for part in self.parts if isinstance(part, ImageInput))


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the model may or must call tools. name: the tool that must be called, for the mode "named"."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""


class Thinking(msgspec.Struct, frozen=True):
    """How the model should think; None leaves the model's default. budget: most tokens of reasoning.

    is_asked: the client asked for it; else it is only the dialect's default, which model servers do not get, because
    some refuse it.
    """

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    is_asked: bool = True


class Conversation(msgspec.Struct, frozen=True):
    """Messages that a chat template turns into a prompt.

    variables: further variables for the template. continues_last: the answer continues the last message. opens_turn:
    whether the template opens a turn of the assistant; None means yes, unless continues_last.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    thinking: Thinking = Thinking()
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)
    continues_last: bool = False
    opens_turn: bool | None = None
    drops_oldest: bool = False
    """Whether the oldest turns are dropped if the conversation is too long; else it is refused."""

    @property
    def images(self) -> tuple[ImageInput, ...]:
        """The images of all messages, in order."""
        return tuple(image for turn in self.turns for image in turn.images)


class Prompts(msgspec.Struct, frozen=True):
    """Bare prompts, each answered separately. echo: each answer begins with its prompt. adds_special: texts get the
    special tokens that the model expects around them."""

    prompts: tuple[Prompt, ...]
    echo: bool = False
    adds_special: bool = True


class SamplingWish(msgspec.Struct, frozen=True):
    """The client's sampling parameters; None means the model's default, else the usual one."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_window: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None


class FieldNames(msgspec.Struct, frozen=True):
    """A dialect's names of the fields that errors of the core mention."""

    messages: str = "messages"
    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    tools: str = "tools"
    tool_choice: str = "tool_choice"
    grammar: str = "grammar"
    stop_ids: str = "stop_ids"
    variables: str = "variables"


class NeutralRequest(msgspec.Struct, frozen=True):
    """One request of any dialect, with all checks done that do not need the model.

    max_tokens: the client's limit; None means all that fits. default_tokens: the limit if max_tokens is None; None
    means all that fits. num_choices: answers to each prompt; num_drawn: answers to generate, of which the likeliest
    num_choices are kept. prompt_logprobs: the number of alternatives for each prompt token; None means no
    log-probabilities for the prompt. keep_alive_s: see GenerateRequest. cache: rules for the prefix cache. drafts:
    whether tokens may be drafted; expected: an answer that the client expects, from which they are.
    """

    model: str | None
    subject: Conversation | Prompts
    sampling: SamplingWish = SamplingWish()
    grammar: GrammarSpec | None = None
    max_tokens: int | None = None
    default_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    num_choices: int = 1
    num_drawn: int = 1
    prompt_logprobs: int | None = None
    priority: int = 0
    keep_alive_s: float | None = None
    cache: CacheWish = ANYBODY
    drafts: bool = True
    expected: str = ""
    names: FieldNames = FieldNames()
