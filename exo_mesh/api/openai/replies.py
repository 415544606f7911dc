"""Turns neutral events into OpenAI's replies, for chat completions and plain completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from exo_mesh import __version__
from exo_mesh.api.core.answer import Answer, AnswerStep
from exo_mesh.api.core.reply import Reply
from exo_mesh.api.core.token_texts import finite, token_name
from exo_mesh.api.openai.objects import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionDetails,
    CompletionLogprobs,
    FunctionCall,
    FunctionDelta,
    PromptDetails,
    PromptScores,
    PromptTokenLogprob,
    TextCompletion,
    TimingsObject,
    ToolCallDelta,
    ToolCallObject,
    Usage,
)
from exo_mesh.api.openai.schema import StreamOptions
from exo_mesh.api.openai.token_logprobs import token_logprobs
from exo_mesh.api.sse import DONE
from exo_mesh.domain.request import TokenLogprob
from exo_mesh.text.assembler import TokenSpan
from exo_mesh.text.output.events import (
    OutputEnd,
    OutputEvent,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
)

FINGERPRINT = f"exo-mesh-{__version__}"


class Delivery(msgspec.Struct, frozen=True):
    """The options of a reply that do not change the answer."""

    stream: bool = False
    options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    tier: str = ""
    """The service tier that the reply names; empty if the request named none."""
    shows_logprobs: bool = False
    shows_prompt_logprobs: bool = False
    shows_timings: bool = False


class OpenAIReply(Reply):
    """Builds one of OpenAI's replies. Subclasses define the format of a choice."""

    def __init__(self, answer: Answer, delivery: Delivery, created: int) -> None:
        self._answer = answer
        self._text = answer.prepared.text
        self._delivery = delivery
        self._created = created
        self._fingerprint = FINGERPRINT
        self._has_begun: set[int] = set()
        self._tier: str | UnsetType = delivery.tier or UNSET

    @abstractmethod
    def chunks(self, step: AnswerStep) -> list[Any]:
        """The chunks of a stream for one step; the last step ends with the usage, if the client asked for it."""

    def closing(self) -> bytes:
        return DONE

    def _by_choice(self, steps: Iterable[AnswerStep]) -> dict[int, list[OutputEvent]]:
        """The events of each choice that the client gets."""
        events: dict[int, list[OutputEvent]] = {index: [] for index in range(len(self._answer.choices))}
        for step in steps:
            events[step.choice] += step.events
        return {choice: events[choice] for choice in self._answer.best()}

    def _usage(self) -> Usage:
        num_prompt, num_tokens = self._answer.num_prompt_tokens, self._answer.num_tokens
        details = CompletionDetails(self._answer.num_reasoning_tokens, *self._answer.num_drafts)
        cached = PromptDetails(self._answer.num_cached_tokens)
        return Usage(num_prompt, num_tokens, num_prompt + num_tokens, cached, details)

    def _usage_of_chunk(self) -> Usage | UnsetType | None:
        if self._delivery.options.continuous_usage_stats:
            return self._usage()
        return None if self._delivery.options.include_usage else UNSET

    def _scores(self, choice: int) -> PromptScores | UnsetType:
        """Log-probabilities of the prompt in vLLM's format: by token id, null for the first token."""
        if not self._delivery.shows_prompt_logprobs:
            return UNSET
        ids = self._answer.prepared.choices[choice].request.prompt_ids
        scores: PromptScores = [None]
        for one in self._answer.prompt_logprobs_of(choice):
            tops = {top.token_id: (top.logprob, rank) for rank, top in enumerate(one.top, 1)}
            by_id = {ids[one.index]: (one.logprob, None), **tops}
            scores.append({str(token_id): self._score(token_id, *found) for token_id, found in by_id.items()})
        return scores

    def _score(self, token_id: int, logprob: float, rank: int | None) -> PromptTokenLogprob:
        return PromptTokenLogprob(finite(logprob), rank, token_name(self._text, token_id))

    def _timings(self) -> TimingsObject | UnsetType:
        if not self._delivery.shows_timings:
            return UNSET
        timings, num_cached = self._answer.timings, self._answer.num_cached_tokens
        num_computed, num_tokens = self._answer.num_prompt_tokens - num_cached, self._answer.num_tokens
        read, written = _speed(num_computed, timings.prompt_s), _speed(num_tokens, timings.answer_s)
        return TimingsObject(num_cached, *read, *written)


class ChatReply(OpenAIReply):
    """Builds `chat.completion` and `chat.completion.chunk`."""

    def whole(self, steps: Iterable[AnswerStep]) -> ChatCompletion:
        found = self._by_choice(steps).items()
        choices = [self._choice(index, choice, events) for index, (choice, events) in enumerate(found)]
        return ChatCompletion(
            self._answer.prepared.id,
            "chat.completion",
            self._created,
            self._answer.prepared.model,
            self._fingerprint,
            choices,
            self._usage(),
            self._tier,
            self._timings(),
            self._scores(0),
        )

    def chunks(self, step: AnswerStep) -> list[ChatCompletionChunk]:
        made: list[ChatCompletionChunk] = []
        if step.choice not in self._has_begun and step.events:
            self._has_begun.add(step.choice)
            content = None if isinstance(step.events[0], ToolCallBegin) else ""
            made.append(self._chunk(step.choice, ChatDelta(role="assistant", content=content, refusal=None)))
        for event in step.events:
            if isinstance(event, TextPart):
                logprobs = self._logprobs(event.tokens) if self._delivery.shows_logprobs and event.tokens else None
                made.append(self._chunk(step.choice, ChatDelta(content=event.text), logprobs))
            elif isinstance(event, OutputEnd):
                choice = ChatChunkChoice(step.choice, ChatDelta(), None, event.reason)  # type: ignore[arg-type]
                made.append(self._made([choice], self._usage_of_chunk()))
            elif (delta := self._delta(step.choice, event)) is not None:
                made.append(self._chunk(step.choice, delta))
        if self._answer.finished:
            if self._delivery.options.include_usage:
                made.append(self._made([], self._usage()))
            if self._delivery.shows_timings:
                made[-1].timings = self._timings()
        return made

    def _chunk(self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None) -> ChatCompletionChunk:
        return self._made([ChatChunkChoice(index, delta, logprobs)], self._usage_of_chunk())

    def _made(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        prepared = self._answer.prepared
        return ChatCompletionChunk(
            prepared.id,
            "chat.completion.chunk",
            self._created,
            prepared.model,
            self._fingerprint,
            choices,
            usage,
            self._tier,
        )

    def _delta(self, choice: int, event: OutputEvent) -> ChatDelta | None:
        match event:
            case ReasoningPart():
                return ChatDelta(reasoning_content=event.text, reasoning=event.text)
            case ToolCallBegin():
                call_id = self._answer.call_id(choice, event.index)
                function = FunctionDelta("", event.name)
                return ChatDelta(tool_calls=[ToolCallDelta(event.index, function, call_id, "function")])
            case ToolCallArguments():
                return ChatDelta(tool_calls=[ToolCallDelta(event.index, FunctionDelta(event.text))])
            case _:
                return None

    def _choice(self, index: int, choice: int, events: list[OutputEvent]) -> ChatChoice:
        text, reasoning = _joined(events, TextPart), _joined(events, ReasoningPart)
        calls = self._calls(choice, events)
        message = ChatMessage(text if text or not calls else None)
        if reasoning:
            message.reasoning_content = message.reasoning = reasoning
        if calls:
            message.tool_calls = calls
        tokens = [token for event in events if isinstance(event, TextPart) for token in event.tokens]
        return ChatChoice(index, message, self._logprobs(tokens), _finish(events))  # type: ignore[arg-type]

    def _calls(self, choice: int, events: list[OutputEvent]) -> list[ToolCallObject]:
        calls: list[ToolCallObject] = []
        for event in events:
            if isinstance(event, ToolCallBegin):
                call_id = self._answer.call_id(choice, event.index)
                calls.append(ToolCallObject(call_id, FunctionCall(event.name, "")))
            elif isinstance(event, ToolCallArguments):
                calls[event.index].function.arguments += event.text
        return calls

    def _logprobs(self, tokens: Iterable[TokenSpan]) -> ChatLogprobs | None:
        if not self._delivery.shows_logprobs:
            return None
        return ChatLogprobs(token_logprobs(self._text, tokens))


class CompletionReply(OpenAIReply):
    """Builds `text_completion`; the chunks of a stream have the same name."""

    def whole(self, steps: Iterable[AnswerStep]) -> TextCompletion:
        found = self._by_choice(steps).items()
        choices = [self._choice(index, choice, events) for index, (choice, events) in enumerate(found)]
        return self._made(choices, self._usage(), self._timings())

    def chunks(self, step: AnswerStep) -> list[TextCompletion]:
        made: list[TextCompletion] = []
        if step.choice not in self._has_begun:
            self._has_begun.add(step.choice)
            if prompt := self._answer.prepared.choices[step.choice].prompt:
                logprobs = self._prompt_logprobs(step.choice) if self._delivery.shows_logprobs else None
                choice = CompletionChoice(step.choice, prompt, logprobs, None)
                made.append(self._made([choice], self._usage_of_chunk()))
        for event in step.events:
            match event:
                case TextPart():
                    made.append(self._chunk(step.choice, event.text, event.tokens, None))
                case OutputEnd():
                    made.append(self._chunk(step.choice, "", [], event.reason))
                case _:
                    pass
        if self._answer.finished:
            if self._delivery.options.include_usage:
                made.append(self._made([], self._usage()))
            if self._delivery.shows_timings:
                made[-1].timings = self._timings()
        return made

    def _chunk(self, index: int, text: str, tokens: Iterable[TokenSpan], finish: str | None) -> TextCompletion:
        offset = len(self._answer.prepared.choices[index].prompt)
        choice = CompletionChoice(index, text, self._logprobs(tokens, offset), finish)  # type: ignore[arg-type]
        return self._made([choice], self._usage_of_chunk())

    def _made(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
        timings: TimingsObject | UnsetType = UNSET,
    ) -> TextCompletion:
        prepared = self._answer.prepared
        return TextCompletion(
            prepared.id,
            "text_completion",
            self._created,
            prepared.model,
            self._fingerprint,
            choices,
            usage,
            timings,
        )

    def _choice(self, index: int, choice: int, events: list[OutputEvent]) -> CompletionChoice:
        prompt = self._answer.prepared.choices[choice].prompt
        tokens = [token for event in events if isinstance(event, TextPart) for token in event.tokens]
        text = prompt + _joined(events, TextPart)
        logprobs = self._logprobs(tokens, len(prompt))
        if logprobs is not None and prompt:
            logprobs = _chained(self._prompt_logprobs(choice), logprobs)
        return CompletionChoice(index, text, logprobs, _finish(events), self._scores(choice))  # type: ignore[arg-type]

    def _prompt_logprobs(self, choice: int) -> CompletionLogprobs:
        """Log-probabilities of the tokens of a prompt; None for the first, because no token precedes it."""
        ids = self._answer.prepared.choices[choice].request.prompt_ids
        found = self._answer.prompt_logprobs_of(choice)
        tops = [self._alternatives(one.top) for one in found]
        return CompletionLogprobs(
            [token_name(self._text, token_id) for token_id in ids],
            [None, *(finite(one.logprob) for one in found)],
            [None, *tops],
            self._text.offsets(ids),
        )

    def _logprobs(self, tokens: Iterable[TokenSpan], offset: int) -> CompletionLogprobs | None:
        if not self._delivery.shows_logprobs:
            return None
        tokens = list(tokens)
        return CompletionLogprobs(
            [token_name(self._text, token.event.token_id) for token in tokens],
            [finite(token.event.logprob) for token in tokens],
            [self._alternatives(token.event.top) for token in tokens],
            [offset + token.start for token in tokens],
        )

    def _alternatives(self, top: Iterable[TokenLogprob]) -> dict[str, float]:
        return {token_name(self._text, one.token_id): finite(one.logprob) for one in top}


def _chained(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def _joined(events: list[OutputEvent], kind: type[TextPart | ReasoningPart]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _finish(events: list[OutputEvent]) -> str:
    last = events[-1]
    assert isinstance(last, OutputEnd)
    return last.reason


def _speed(num_tokens: int, seconds: float) -> tuple[int, float, float, float]:
    """(tokens, milliseconds of all, milliseconds per token, tokens per second); 0 if nothing was measured."""
    per_token_ms = 1000 * seconds / num_tokens if num_tokens else 0.0
    return num_tokens, 1000 * seconds, per_token_ms, num_tokens / seconds if seconds > 0 else 0.0
