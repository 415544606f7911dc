"""What a client asks for, in words of no dialect: each translates its bodies into a NeutralRequest. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from exo_mesh.domain.grammar import GrammarSpec
from exo_mesh.text.output.tools import Tool

Role = Literal["developer", "system", "user", "assistant", "tool"]
Prompt = str | tuple[int, ...]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made earlier in the conversation. arguments: the JSON object, decoded."""

    id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. where: its place in the client's body, for errors. tool_call_id: the call that a tool answers."""

    role: Role
    text: str
    where: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    has_cache_marks: bool = False
    """The client marks in it up to where its prompt is cached: then not a character of it may be moved."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """name: of the tool that must be called, for the mode "named"."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""


@dataclass(frozen=True, slots=True)
class Thinking:
    """How the model shall think. None: as it does by itself. budget: most tokens of thoughts."""

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that a chat template turns into a prompt.

    variables: further names for the template. continues_last: the answer goes on inside the last message.
    opens_turn: whether the template opens a turn of the assistant; None: unless continues_last.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    thinking: Thinking = Thinking()
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues_last: bool = False
    opens_turn: bool | None = None


@dataclass(frozen=True, slots=True)
class Prompts:
    """Bare prompts, each answered by itself. echo: each answer begins with its prompt."""

    prompts: tuple[Prompt, ...]
    echo: bool = False


@dataclass(frozen=True, slots=True)
class SamplingWish:
    """What the client says about drawing; None: the model's own default, else the usual one."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What a dialect calls the fields that errors of the core name."""

    messages: str = "messages"
    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    tools: str = "tools"
    tool_choice: str = "tool_choice"
    grammar: str = "grammar"
    stop_ids: str = "stop_ids"
    variables: str = "variables"


@dataclass(frozen=True, slots=True)
class NeutralRequest:
    """One request of any dialect, checked as far as it can be without the model.

    max_tokens: None: all that fits. default_tokens: likewise, but no more than that many, for requests that say
    nothing. num_choices: answers to each prompt; num_drawn: so many are made, of which the likeliest are kept.
    prompt_logprobs: how many alternatives each prompt token comes with; None: prompt tokens have no log-probabilities.
    keep_alive_s: see GenerateRequest.
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
    names: FieldNames = FieldNames()
