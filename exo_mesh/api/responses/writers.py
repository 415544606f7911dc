"""Makes the events of one output item: its beginning, its pieces, and its end. Used live, and for stored responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from exo_mesh.api.openai.objects import ChatTokenLogprob
from exo_mesh.api.responses.event_objects import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    Event,
    ItemAdded,
    ItemDone,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    SummaryAdded,
    SummaryDelta,
    SummaryDone,
    SummaryPartDone,
)
from exo_mesh.api.responses.objects import (
    EventLogprob,
    EventTopLogprob,
    ItemStatus,
    OutputCustomCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    SummaryText,
)
from exo_mesh.api.responses.opaque import packed
from exo_mesh.api.responses.tools import ToolName, custom_input
from exo_mesh.text.output.json_text import is_json

PieceSize = tuple[int, int]
"""Characters of a piece of text, and its tokens with log-probabilities."""


class ItemOptions(msgspec.Struct, frozen=True):
    """How items are written. as_summary: reasoning is a summary. shows_opaque: reasoning also has its opaque form."""

    as_summary: bool = False
    shows_opaque: bool = False


class ItemWriter(ABC):
    """Writes one item. item_id, place: the id of the item and its index among the items."""

    def __init__(self, item_id: str, place: int) -> None:
        self.item_id = item_id
        self.place = place
        self.sizes: list[PieceSize] = []
        """The sizes of the pieces so far, from which the same events can be made again."""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self._pieces)

    def add(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> list[Event]:
        """The events of a piece of text."""
        self._pieces.append(text)
        self.sizes.append((len(text), len(logprobs)))
        return self._piece(text, logprobs)

    @abstractmethod
    def begin(self) -> list[Event]:
        """The events with which the item begins."""

    @abstractmethod
    def _piece(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> list[Event]:
        """The events of a piece."""

    @abstractmethod
    def end(self, status: ItemStatus) -> tuple[OutputItem, list[Event]]:
        """The finished item, and the events with which it ends."""


class MessageWriter(ItemWriter):
    """Writes a message with one part of text."""

    def __init__(self, item_id: str, place: int) -> None:
        super().__init__(item_id, place)
        self.logprobs: list[ChatTokenLogprob] = []

    def begin(self) -> list[Event]:
        item = OutputMessage(id=self.item_id, status="in_progress", content=[])
        part = OutputText("")
        return [
            ItemAdded(output_index=self.place, item=item),
            PartAdded(item_id=self.item_id, output_index=self.place, part=part),
        ]

    def _piece(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> list[Event]:
        self.logprobs += logprobs
        shown = [_of_event(one) for one in logprobs]
        return [OutputTextDelta(item_id=self.item_id, output_index=self.place, delta=text, logprobs=shown)]

    def end(self, status: ItemStatus) -> tuple[OutputItem, list[Event]]:
        part = OutputText(self.text, logprobs=self.logprobs)
        item = OutputMessage(id=self.item_id, status=status, content=[part])
        shown = [_of_event(one) for one in self.logprobs]
        where: dict[str, Any] = {"item_id": self.item_id, "output_index": self.place}
        return item, [
            OutputTextDone(**where, text=part.text, logprobs=shown),
            PartDone(**where, part=part),
            ItemDone(output_index=self.place, item=item),
        ]


class ReasoningWriter(ItemWriter):
    """Writes reasoning, as such or as a summary."""

    def __init__(self, item_id: str, place: int, options: ItemOptions) -> None:
        super().__init__(item_id, place)
        self._options = options

    def begin(self) -> list[Event]:
        where: dict[str, Any] = {"item_id": self.item_id, "output_index": self.place}
        if self._options.as_summary:
            summary = OutputReasoning(id=self.item_id, summary=[], status="in_progress")
            return [ItemAdded(output_index=self.place, item=summary), SummaryAdded(**where, part=SummaryText(""))]
        item = OutputReasoning(id=self.item_id, summary=[], content=[], status="in_progress")
        return [ItemAdded(output_index=self.place, item=item), PartAdded(**where, part=ReasoningText(""))]

    def _piece(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> list[Event]:
        if self._options.as_summary:
            return [SummaryDelta(item_id=self.item_id, output_index=self.place, delta=text)]
        return [ReasoningDelta(item_id=self.item_id, output_index=self.place, delta=text)]

    def end(self, status: ItemStatus) -> tuple[OutputItem, list[Event]]:
        text = self.text
        where: dict[str, Any] = {"item_id": self.item_id, "output_index": self.place}
        item = OutputReasoning(id=self.item_id, summary=[], status=status)
        events: list[Event]
        if self._options.as_summary:
            summary = SummaryText(text)
            item.summary = [summary]
            events = [SummaryDone(**where, text=text), SummaryPartDone(**where, part=summary)]
        else:
            part = ReasoningText(text)
            item.content = [part]
            events = [ReasoningDone(**where, text=text), PartDone(**where, part=part)]
        if self._options.shows_opaque:
            item.encrypted_content = packed(text)
        return item, [*events, ItemDone(output_index=self.place, item=item)]


class FunctionCallWriter(ItemWriter):
    """Writes a call of a function, whose pieces are JSON text. A call that the end of the answer cuts is incomplete,
    because clients run the calls of completed items."""

    def __init__(self, item_id: str, place: int, call_id: str, tool: ToolName) -> None:
        super().__init__(item_id, place)
        self._call_id = call_id
        self._tool = tool

    def begin(self) -> list[Event]:
        return [ItemAdded(output_index=self.place, item=self._item("", "in_progress"))]

    def _piece(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> list[Event]:
        return [ArgumentsDelta(item_id=self.item_id, output_index=self.place, delta=text)]

    def end(self, status: ItemStatus) -> tuple[OutputItem, list[Event]]:
        is_whole = not self.text or is_json(self.text)
        item = self._item(self.text, status if is_whole else "incomplete")
        done = ArgumentsDone(
            item_id=self.item_id, output_index=self.place, name=self._tool.name, arguments=item.arguments
        )
        return item, [done, ItemDone(output_index=self.place, item=item)]

    def _item(self, arguments: str, status: ItemStatus) -> OutputFunctionCall:
        return OutputFunctionCall(
            id=self.item_id,
            call_id=self._call_id,
            name=self._tool.name,
            arguments=arguments,
            status=status,
            namespace=self._tool.namespace or UNSET,
        )


class CustomCallWriter(ItemWriter):
    """Writes a call of a custom tool. Its pieces are the JSON text of a function's arguments; the input in it is sent
    at the end, as a whole."""

    def __init__(self, item_id: str, place: int, call_id: str, tool: ToolName) -> None:
        super().__init__(item_id, place)
        self._call_id = call_id
        self._tool = tool

    def begin(self) -> list[Event]:
        return [ItemAdded(output_index=self.place, item=self._item(""))]

    def _piece(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> list[Event]:
        return []

    def end(self, status: ItemStatus) -> tuple[OutputItem, list[Event]]:
        item = self._item(custom_input(self.text))
        where: dict[str, Any] = {"item_id": self.item_id, "output_index": self.place}
        return item, [
            CustomInputDelta(**where, delta=item.input),
            CustomInputDone(**where, input=item.input),
            ItemDone(output_index=self.place, item=item),
        ]

    def _item(self, text: str) -> OutputCustomCall:
        return OutputCustomCall(
            id=self.item_id,
            call_id=self._call_id,
            name=self._tool.name,
            input=text,
            namespace=self._tool.namespace or UNSET,
        )


def _of_event(one: ChatTokenLogprob) -> EventLogprob:
    top = [EventTopLogprob(other.token, other.logprob) for other in one.top_logprobs]
    return EventLogprob(one.token, one.logprob, top)
