"""The stored form of a finished response: its input, the response, and the facts from which its events are made
again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from exo_mesh.api.openai.objects import ChatTokenLogprob
from exo_mesh.api.responses.event_objects import Event
from exo_mesh.api.responses.ids import item_id
from exo_mesh.api.responses.items import kind_of
from exo_mesh.api.responses.objects import (
    OutputCustomCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    ResponseObject,
)
from exo_mesh.api.responses.replies import FIRST_OF_ANSWER, FinishedResponse, first_events, last_event
from exo_mesh.api.responses.schema import Item
from exo_mesh.api.responses.tools import ToolName
from exo_mesh.api.responses.turns import INPUT
from exo_mesh.api.responses.writers import (
    CustomCallWriter,
    FunctionCallWriter,
    ItemOptions,
    ItemWriter,
    MessageWriter,
    PieceSize,
    ReasoningWriter,
)
from exo_mesh.domain.bounded_json import MAX_KEPT_VALUES, decode_bounded
from exo_mesh.errors import TransportError


class _StoredOutput(msgspec.Struct):
    """The only part of a response that a later request needs; the rest, such as its tools, may be long."""

    output: list[dict[str, Any]]


class StoredResponse(msgspec.Struct):
    """A response with the input of its request. References in the input are not resolved: the item stays where it
    is."""

    input: msgspec.Raw
    response: msgspec.Raw
    sizes: msgspec.Raw

    def items(self) -> list[Item]:
        """The input, each item with an id."""
        found: list[Item] = msgspec.json.decode(self.input)
        return found

    def output(self) -> list[Item]:
        """The items of the reply."""
        return msgspec.json.decode(self.response, type=_StoredOutput).output


def stored_bytes(items: Sequence[Item], finished: FinishedResponse) -> bytes:
    """The bytes that are kept of a response. items: of the request's input."""
    named = [_named(item, finished.response.id, place) for place, item in enumerate(items)]
    return msgspec.json.encode({"input": named, "response": finished.response, "sizes": finished.sizes})


def read_stored(data: bytes) -> StoredResponse:
    """Decode the bytes of a response. Raises TransportError if a peer of another version wrote them."""
    try:
        return decode_bounded(data, StoredResponse, MAX_KEPT_VALUES)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
        raise _unreadable() from exc


def events_again(stored: StoredResponse) -> list[Event]:
    """The events with which the response was streamed. Raises TransportError as read_stored does."""
    try:
        response = msgspec.json.decode(stored.response, type=ResponseObject)
        sizes = msgspec.json.decode(stored.sizes, type=list[list[PieceSize]])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
        raise _unreadable() from exc
    begun = msgspec.structs.replace(response, status="in_progress", output=[], usage=None, incomplete_details=None)
    made: list[Event] = []
    for place, (item, pieces) in enumerate(zip(response.output, sizes, strict=True)):
        writer, text, logprobs = _writer(item, place)
        made += writer.begin()
        start = first = 0
        for num_chars, num_tokens in pieces:
            made += writer.add(text[start : start + num_chars], logprobs[first : first + num_tokens])
            start, first = start + num_chars, first + num_tokens
        made += writer.end(item.status if not isinstance(item, OutputCustomCall) else "completed")[1]
    made.append(last_event(response))
    for number, event in enumerate(made, FIRST_OF_ANSWER):
        event.sequence_number = number
    return first_events(begun) + made


def _writer(item: OutputItem, place: int) -> tuple[ItemWriter, str, list[ChatTokenLogprob]]:
    """(the writer of an item, its text, its log-probabilities)."""
    match item:
        case OutputMessage(id=name, content=content):
            return MessageWriter(name, place), content[0].text, content[0].logprobs
        case OutputReasoning(id=name):
            options = ItemOptions(bool(item.summary), isinstance(item.encrypted_content, str))
            parts: Sequence[Any] = item.summary or item.content or ()
            return ReasoningWriter(name, place, options), "".join(part.text for part in parts), []
        case OutputFunctionCall(id=name, arguments=arguments):
            return FunctionCallWriter(name, place, item.call_id, _tool_of(item)), arguments, []
        case OutputCustomCall(id=name, input=text):
            writer = CustomCallWriter(name, place, item.call_id, _tool_of(item))
            writer.add(json.dumps({INPUT: text}))
            return writer, "", []


def _tool_of(item: OutputFunctionCall | OutputCustomCall) -> ToolName:
    return ToolName(item.name, item.namespace if isinstance(item.namespace, str) else "")


def _named(item: Item, response_id: str, place: int) -> Item:
    """The item with an id and a type. The content of a message becomes a list of parts."""
    kind = kind_of(item)
    made = {"id": item_id("in", response_id, place), **item, "type": kind}
    if made["id"] is None:
        made["id"] = item_id("in", response_id, place)
    if kind == "message":
        made.setdefault("status", "completed")
        if isinstance(made["content"], str):
            text = {"type": "output_text", "annotations": []} if made["role"] == "assistant" else {"type": "input_text"}
            made["content"] = [{**text, "text": made["content"]}]
    return made


def _unreadable() -> TransportError:
    return TransportError("a peer of another exo-mesh version keeps this response; ask that peer")
