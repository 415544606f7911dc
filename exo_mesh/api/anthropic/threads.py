"""Holds the conversation of a message under the id of its reply, so that a later request sends only its new messages.

A thread is a chain of kept answers: each has the messages of its request and the reply, the first one also the system
prompt and the tools.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from exo_mesh.api.access import Caller
from exo_mesh.api.anthropic.objects import ContentObject
from exo_mesh.api.anthropic.schema import Blocks, ContinuedThread, CountTokensBody, CreatedThread, MessageBody
from exo_mesh.api.bodies.values import ValueBudget
from exo_mesh.domain.bounded_json import MAX_KEPT_VALUES, decode_bounded
from exo_mesh.errors import InputError, UnknownAnswerError
from exo_mesh.rings.serving.kept_answers import KeptAnswer
from exo_mesh.rings.serving.kept_service import KeptService

B = TypeVar("B", bound=CountTokensBody)

PREFIX = "msg_"
_FIELD = "thread.previous_message_id"


class HeldTurn(msgspec.Struct):
    """One request of a thread and its reply. system, tools: of the request that created the thread."""

    messages: list[MessageBody]
    reply: list[dict[str, Any]]
    system: str | Blocks | None = None
    tools: Blocks | None = None

    def conversation(self) -> list[MessageBody]:
        """The messages and the reply. A reply that continues the last message is one message with it."""
        if not self.reply:
            return self.messages
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant":
            return [*self.messages, MessageBody(role="assistant", content=self.reply)]
        begun = [{"type": "text", "text": last.content}] if isinstance(last.content, str) else last.content
        return [*self.messages[:-1], MessageBody(role="assistant", content=_continued(begun, self.reply))]


def _continued(begun: Blocks, reply: Blocks) -> Blocks:
    """The blocks of a message and of the reply that continues it. A text that goes on is one block."""
    if begun and begun[-1].get("type") == reply[0].get("type") == "text":
        return [*begun[:-1], {**begun[-1], "text": begun[-1]["text"] + reply[0]["text"]}, *reply[1:]]
    return [*begun, *reply]


def is_held(body: CountTokensBody, kept: KeptService) -> bool:
    """Whether the reply to this body is to be held. Raises InputError if the node keeps nothing."""
    if body.thread is not None and not kept.is_on:
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        message = "this node keeps no conversations (--keep-responses 0); leave out thread and send all messages"
        raise InputError(message, param="thread", details=details)
    return body.thread is not None


async def with_thread(body: B, kept: KeptService, key_id: str | None) -> tuple[B, int]:
    """(the body with the whole conversation of its thread, how many of its messages the thread held). key_id: see
    KeptService.

    Raises UnknownAnswerError if the thread is not kept, and InputError for a field that a thread keeps from its start.
    """
    thread = body.thread
    if not isinstance(thread, ContinuedThread):
        return body, 0
    for name in ("system", "tools"):
        if getattr(body, name):
            raise InputError(f"{name} cannot change in a thread: leave it out, or create a new thread", param=name)
    turns = await _turns(thread.previous_message_id, kept, key_id)
    held = [message for turn in turns for message in turn.conversation()]
    first = turns[0]
    if not body.messages:
        raise InputError("messages is empty; at least one message is required", param="messages")
    made = msgspec.structs.replace(body, messages=[*held, *body.messages], system=first.system, tools=first.tools)
    return made, len(held)


async def _turns(message_id: str, kept: KeptService, key_id: str | None) -> list[HeldTurn]:
    """The requests of a thread up to the request with this reply, oldest first."""
    try:
        if not message_id.startswith(PREFIX):
            raise UnknownAnswerError(kept.missing(message_id))
        answers, budget = await kept.chain(key_id, message_id), ValueBudget(MAX_KEPT_VALUES)
        for answer in answers:
            budget.take(answer.data, _FIELD)
        return [decode_bounded(answer.data, HeldTurn, MAX_KEPT_VALUES) for answer in reversed(answers)]
    except UnknownAnswerError as exc:
        details = {"error_code": "thread_not_found"}
        message = f"{exc}; send all messages and create a new thread"
        raise UnknownAnswerError(message, param=_FIELD, details=details) from exc
    except InputError as exc:
        raise InputError(str(exc), param=_FIELD) from exc


def held_answer(body: CountTokensBody, caller: Caller, message_id: str, reply: list[ContentObject]) -> KeptAnswer:
    """The stored form of a request and its reply. body: as the client sent it."""
    thread = body.thread
    previous = thread.previous_message_id if isinstance(thread, ContinuedThread) else ""
    data: dict[str, Any] = {"messages": body.messages, "reply": reply}
    if isinstance(thread, CreatedThread):
        data |= {"system": body.system, "tools": body.tools}
    return KeptAnswer(message_id, caller.key_id, previous, msgspec.json.encode(data))
