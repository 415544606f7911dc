"""What is said once of a call between peers: a row with its name, messages and limits, and the answer of a node to it.

Each package has its rows and answers in its `calls.py`, where messages become values. A node serves the answers of all
packages (wire/control_server.py), and calls a peer by a row (wire/control_client.py). This module knows no
network library.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from google.protobuf.message import Message

from exo_mesh.wire.call_access import Rule
from exo_mesh.wire.incoming import MAX_BYTES, STRANGER_BYTES

CALL_S = 5.0
"""Deadline of calls that answer from memory or a local file."""

LOOK_S = 1.5
"""Deadline of a question whose caller has a waiting client and may try another address."""

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True, eq=False)
class CallRow(Generic[Q, R]):
    """One call. The name is that of the call in `service` of the protos, so it is part of the wire.

    access: who may make the call in an open mesh. reply_bytes: longest message of the answer. peer_bytes: longest
    request of a live peer, which names itself in the first field; the request of any other caller has at most
    STRANGER_BYTES. takes_unknown: the answer also gets requests with fields that this version does not know: news, in
    which they are ignored, and requests that the answer refuses itself. Other requests with such fields are refused.
    """

    name: str
    request: type[Q]
    reply: type[R]
    access: Rule
    _: KW_ONLY
    reply_bytes: int = MAX_BYTES
    peer_bytes: int = STRANGER_BYTES
    takes_unknown: bool = False
    service: str = "Control"

    @property
    def path(self) -> str:
        """The path of the call in gRPC."""
        return f"/exo_mesh.{self.service}/{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class PeerCall(CallRow[Q, R]):
    """A call with one reply. deadline_s: of the call over the wire, unless the caller gives another one."""

    deadline_s: float


@dataclass(frozen=True, slots=True, eq=False)
class PeerStream(CallRow[Q, R]):
    """A call that is answered by a stream. deadline_s: of the whole stream; None: the caller watches the time between
    messages. outlives_verdict: a verdict of the membership about the peer does not end the stream."""

    deadline_s: float | None
    _: KW_ONLY
    outlives_verdict: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PeerUpload(CallRow[Q, R]):
    """A call with one reply whose request is a stream. Its messages are not checked before the answer reads them."""

    deadline_s: float


class CallAnswer(msgspec.Struct, Generic[Q, R], frozen=True):
    """The answer of a node to a call with one reply. function: gets the request and gRPC's name of the caller, "" for
    this node itself; a MeshError that it raises reaches the caller as the same error."""

    row: PeerCall[Q, R]
    function: Callable[[Q, str], Awaitable[R]]


class StreamAnswer(msgspec.Struct, Generic[Q, R], frozen=True):
    """The answer of a node to a stream. function: yields the messages; a MeshError ends the stream with that error."""

    row: PeerStream[Q, R]
    function: Callable[[Q], AsyncGenerator[R, None]]


class UploadAnswer(msgspec.Struct, Generic[Q, R], frozen=True):
    """The answer of a node to an upload. function: gets the messages of the request."""

    row: PeerUpload[Q, R]
    function: Callable[[AsyncIterator[Q]], Awaitable[R]]


AnyRow: TypeAlias = "PeerCall[Any, Any] | PeerStream[Any, Any] | PeerUpload[Any, Any]"
AnyAnswer: TypeAlias = "CallAnswer[Any, Any] | StreamAnswer[Any, Any] | UploadAnswer[Any, Any]"


def answer(row: PeerCall[Q, R], function: Callable[[Q], Awaitable[R]]) -> CallAnswer[Q, R]:
    """An answer that does not depend on the caller."""
    return CallAnswer(row, lambda request, caller: function(request))
