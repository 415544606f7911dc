"""The rows of all calls between peers, and a node that answers each of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from importlib import import_module
from pathlib import Path

from google.protobuf.message import Message

import exo_mesh
from exo_mesh.wire.peer_call import AnyAnswer, AnyRow, CallAnswer, PeerCall, PeerStream, PeerUpload, StreamAnswer

PACKAGE = Path(exo_mesh.__file__).parent


def all_rows() -> list[AnyRow]:
    """The rows of every `calls.py`."""
    files = PACKAGE.rglob("calls.py")
    names = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]
    found = {value for name in names for value in vars(import_module(name)).values() if _is_row(value)}
    return sorted(found, key=lambda row: row.path)


def _is_row(value: object) -> bool:
    return isinstance(value, PeerCall | PeerStream | PeerUpload)


def answers_of(reply: Callable[[AnyRow, Message], list[Message]]) -> list[AnyAnswer]:
    """Answers to all control calls. reply: returns the messages that answer a request; a call gets the first."""
    return [_answer(row, reply) for row in all_rows() if row.service == "Control"]


def _answer(row: AnyRow, reply: Callable[[AnyRow, Message], list[Message]]) -> AnyAnswer:
    async def one(request: Message, caller: str) -> Message:
        return reply(row, request)[0]

    async def several(request: Message) -> AsyncGenerator[Message, None]:
        for message in reply(row, request):
            yield message

    assert not isinstance(row, PeerUpload)
    return CallAnswer(row, one) if isinstance(row, PeerCall) else StreamAnswer(row, several)
