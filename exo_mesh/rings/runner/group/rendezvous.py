"""Checks that all ranks of a tensor group are there, before the library of their collectives connects them.

`mx.distributed.init` waits without a deadline, names no missing rank, and holds Python's lock meanwhile, so that not
even a heartbeat is sent. So the leader listens first, on the port that its collectives will use. Every other rank dials
that port and sends its rank number, and none continues until all are there. The port is free again when this returns.
"""

from __future__ import annotations

import contextlib
import hashlib
import selectors
import socket
import struct
import time

from exo_mesh.base.printable import reason_of
from exo_mesh.domain.addresses import split
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.errors import RankLostError

MEET_S = 30.0
"""Seconds from the first rank that waits to the last that connects: they are started together, and importing MLX takes
1 to 10 s on a busy machine."""

DIAL_EVERY_S = 0.1
MAX_CALLERS = 64
"""Connections held at once; a caller that is no rank is dropped as soon as its first bytes show it, or at the deadline
if it sends nothing."""

_HELLO = struct.Struct("<32sI")
_GO = b"!"


def group_key(plan: Plan, stage: int) -> bytes:
    """32 bytes by which the ranks of one group of one plan recognise each other; ranks of an older ballot have another
    key."""
    return hashlib.sha256(f"{plan.digest} {stage}".encode()).digest()


def meet(wiring: RankWiring, key: bytes, patience_s: float = MEET_S) -> None:
    """Return when all ranks are there. Blocks. Raises RankLostError that names the missing ranks."""
    deadline = time.monotonic() + patience_s
    try:
        if wiring.is_leader:
            _Leader(wiring, key, deadline).run()
        else:
            _follow(wiring, key, deadline)
    except TimeoutError as exc:
        raise RankLostError(f"{exc} in {patience_s:.0f} s") from exc
    except OSError as exc:
        raise RankLostError(
            f"rank {wiring.rank} cannot meet the other ranks at {wiring.endpoints[0]}: {reason_of(exc)}"
        ) from exc


class _Leader:
    """Listens until every rank has connected. The callers close first, so the port does not linger."""

    def __init__(self, wiring: RankWiring, key: bytes, deadline: float) -> None:
        self._wiring, self._key, self._deadline = wiring, key, deadline
        self._said: dict[socket.socket, bytes] = {}
        self._here: dict[int, socket.socket] = {}

    def run(self) -> None:
        host, port = split(self._wiring.endpoints[0])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.create_server((host, int(port)), family=family) as server, selectors.DefaultSelector() as ready:
                server.setblocking(False)
                ready.register(server, selectors.EVENT_READ)
                while missing := self._missing():
                    events = ready.select(max(0.0, self._deadline - time.monotonic()))
                    if not events:
                        raise TimeoutError(
                            f"rank {', '.join(map(str, missing))} of {self._wiring.size} did not connect"
                        )
                    for key, _ in events:
                        self._serve(server, key.fileobj, ready)
            self._send_off()
        finally:
            for caller in (*self._said, *self._here.values()):
                caller.close()

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._wiring.size) if rank not in self._here]

    def _serve(self, server: socket.socket, ready_socket: object, ready: selectors.BaseSelector) -> None:
        if ready_socket is server:
            caller, _ = server.accept()
            if len(self._said) >= MAX_CALLERS:
                caller.close()
                return
            caller.setblocking(False)
            self._said[caller] = b""
            ready.register(caller, selectors.EVENT_READ)
            return
        assert isinstance(ready_socket, socket.socket), "nothing else is registered"
        self._hear(ready_socket, ready)

    def _hear(self, caller: socket.socket, ready: selectors.BaseSelector) -> None:
        said = self._said[caller]
        try:
            more = caller.recv(_HELLO.size - len(said))
        except OSError:
            more = b""
        said += more
        if more and len(said) < _HELLO.size:
            self._said[caller] = said
            return
        ready.unregister(caller)
        del self._said[caller]
        rank = _rank_in(said, self._key)
        if rank in self._missing():
            self._here[rank] = caller
        else:
            caller.close()

    def _send_off(self) -> None:
        for rank, caller in self._here.items():
            caller.settimeout(max(0.01, self._deadline - time.monotonic()))
            try:
                caller.sendall(_GO)
                caller.recv(1)
            except OSError as exc:
                raise RankLostError(f"rank {rank} connected and then disconnected: {reason_of(exc)}") from exc


def _rank_in(said: bytes, key: bytes) -> int:
    """The rank number in a hello; -1 for a hello of another group."""
    if len(said) != _HELLO.size:
        return -1
    theirs, rank = _HELLO.unpack(said)
    return int(rank) if theirs == key else -1


def _follow(wiring: RankWiring, key: bytes, deadline: float) -> None:
    host, port = split(wiring.endpoints[0])
    called = False
    while (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(ConnectionError), socket.create_connection((host, int(port)), left_s) as leader:
            called = True
            leader.sendall(_HELLO.pack(key, wiring.rank))
            leader.settimeout(max(0.01, deadline - time.monotonic()))
            if leader.recv(1) == _GO:
                return
        time.sleep(DIAL_EVERY_S)
    who = "not all ranks connected" if called else "the leader did not answer"
    raise TimeoutError(f"rank {wiring.rank} waited at {wiring.endpoints[0]}, but {who}")
