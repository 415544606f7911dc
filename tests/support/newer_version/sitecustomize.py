"""On PYTHONPATH, this makes the exo-mesh of a process one of the next protocol version, which says and asks for things
that the exo-mesh of today does not know. Its nodes and runners still do everything else as today."""

from __future__ import annotations

import sys
from typing import Any

FIELD = 900
"""A field that no version has; below the numbers of those that may be left out."""

HINT = 1900
NEEDS_FIELD, NEEDS_OP = 77, 78
"""A request of so many tokens at most asks for something new: by a field of its own, or by an operation in frames."""


def with_field(message: Any, number: int = FIELD) -> Any:
    """The message with a varint of 1 in a field that its reader does not know."""
    key = number << 3
    message.MergeFromString(bytes([key & 0x7F | 0x80, key >> 7, 1]))
    return message


def be_newer() -> None:
    import exo_mesh

    exo_mesh.PROTOCOL_VERSION += 1
    exo_mesh.__version__ = "9.0.0"


def say_more() -> None:
    """In what a node tells of itself, in readings, in a record of a kind of its own, and as a hint in every request."""
    from exo_mesh.wire.message_codec import Codec

    write = Codec.write

    def write_more(self: Any, value: Any, **besides: Any) -> Any:
        message, name = write(self, value, **besides), self.message.DESCRIPTOR.name
        if name in ("HelloRequest", "HelloReply"):
            with_field(message.peer)
        return with_field(message) if name in ("PeerInfo", "Telemetry") else message

    Codec.write = write_more  # type: ignore[method-assign]
    begin_to_say_it()


def begin_to_say_it() -> None:
    from exo_mesh.domain.view import ForeignInfo, Record, RecordKey
    from exo_mesh.mesh.membership.service import (
        Membership,  # after the codec was changed: others take its functions
    )
    from exo_mesh.wire.control_client import ControlClient
    from exo_mesh.wire.proto import control_pb2 as pb

    start, call, stream = Membership.start, ControlClient.call, ControlClient.stream

    def start_with_a_wish(self: Any, own: Any) -> None:
        start(self, own)
        records, key = self._roster.records, RecordKey("wish", "w-1", own.id)
        records._version += 1
        message = with_field(pb.Record(**key._asdict(), version=records._version))
        wish = Record(key, records._version, ForeignInfo(message.SerializeToString()))
        records.view.merge([wish], self._roster.clock())

    Membership.start = start_with_a_wish  # type: ignore[method-assign]
    ControlClient.call = lambda self, row, request, timeout_s=None: call(  # type: ignore[method-assign, assignment]
        self, row, with_field(request, HINT), timeout_s
    )
    ControlClient.stream = lambda self, row, request, **options: stream(  # type: ignore[method-assign, assignment]
        self, row, with_field(request, HINT), **options
    )


def ask_for_more() -> None:
    """Of a driver, as an entry peer."""
    from exo_mesh.wire import control_driver

    told = control_driver.request_to_proto

    def with_more(plan: Any, request: Any) -> Any:
        message = with_field(told(plan, request), HINT)
        return with_field(message) if request.max_tokens == NEEDS_FIELD else message

    control_driver.request_to_proto = with_more


def pin_prefixes() -> None:
    """As the driver of a ring; stages of this version know the operation."""
    from exo_mesh.domain.frame import UnknownOp
    from exo_mesh.rings.runner.driver import Driver
    from exo_mesh.rings.runner.stage import Stage

    submit, apply = Driver.submit, Stage._apply_ops

    def submit_and_pin(self: Any, request: Any, mailbox: Any) -> None:
        before = set(self._live)
        submit(self, request, mailbox)
        if request.max_tokens == NEEDS_OP:
            self._ops += [UnknownOp("Pin", sequence, (1,)) for sequence in set(self._live) - before]

    def apply_known(self: Any, frame: Any) -> Any:
        return apply(self, frame.changed(ops=tuple(op for op in frame.ops if not isinstance(op, UnknownOp))))

    Driver.submit = submit_and_pin  # type: ignore[method-assign]
    Stage._apply_ops = apply_known  # type: ignore[method-assign]


if __name__ == "sitecustomize":  # not where a test imports the numbers above
    be_newer()
    if "exo_mesh.cli.main" in sys.orig_argv:
        say_more()
        ask_for_more()
    elif "exo_mesh.rings.runner" in sys.orig_argv:
        pin_prefixes()
