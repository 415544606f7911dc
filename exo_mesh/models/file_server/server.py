"""The file server of a node: listens, and serves each peer in a thread of its own."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from exo_mesh.base.clock import monotonic
from exo_mesh.models.file_server.connections import HEAD_S, IDLE_S, MAX_CONNECTIONS, FileConnections
from exo_mesh.models.file_server.pace import CopyPace
from exo_mesh.models.file_server.tls import server_context
from exo_mesh.security.credentials import CredentialSource

if TYPE_CHECKING:
    from exo_mesh.models.file_server.answering import Answerer
    from exo_mesh.models.file_server.offered import Models

_BACKLOG = 128
_AGAIN_S = 1.0
"""Pause after the system refused a connection for lack of file descriptors or memory."""

_STOP_S = 2.0

_log = logging.getLogger(__name__)


class FileServer:
    """Serves model files to peers, and nothing else.

    models: (directory, card digest) of a model by its name; called in threads of this server. credentials: on a closed
    mesh; each new connection uses the current ones. is_busy: whether streams run on this machine; called in threads of
    this server, after each piece.
    """

    def __init__(
        self,
        models: Models,
        credentials: CredentialSource | None = None,
        *,
        is_busy: Callable[[], bool] = lambda: False,
        max_connections: int = MAX_CONNECTIONS,
        head_s: float = HEAD_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._credentials = credentials
        self._connections = FileConnections(max_connections)
        self._models = models
        self._pace = CopyPace(is_busy)
        self._head_s, self._idle_s = head_s, idle_s
        self._stopping = threading.Event()
        self._acceptor: threading.Thread | None = None
        self._wake: socket.socket | None = None
        self._threads: set[threading.Thread] = set()

    def start(self, host: str, port: int) -> int:
        """Listens, and returns the port; 0 chooses any free one. Call it once.

        Raises OSError, and ValueError for unusable credentials.
        """
        if self._credentials is not None:
            server_context(self._credentials.current)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            (host.strip("[]"), port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual
        )
        listener.setblocking(False)
        bound: int = listener.getsockname()[1]
        self._wake, woken = socket.socketpair()
        self._acceptor = self._run(self._accept_all, listener, woken)
        return bound

    def stop(self) -> None:
        """Cuts all connections and waits for their threads, which end soon. May be called more than once."""
        self._stopping.set()
        self._connections.close()
        if self._acceptor is None or self._wake is None:
            return
        self._wake.close()
        self._acceptor.join(_STOP_S)  # first, because it starts the others
        end = monotonic() + _STOP_S
        for thread in list(self._threads):
            thread.join(max(0.0, end - monotonic()))

    def _run(self, work: Callable[..., None], *args: object) -> threading.Thread:
        def run() -> None:
            try:
                work(*args)
            except Exception:  # noqa: BLE001 - nothing else would log it
                _log.exception("serving files to a peer failed")
            finally:
                self._threads.discard(thread)

        thread = threading.Thread(target=run, name="peer-files", daemon=True)
        self._threads.add(thread)
        thread.start()
        return thread

    def _accept_all(self, listener: socket.socket, woken: socket.socket) -> None:
        with listener, woken, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while not self._stopping.is_set():
                selector.select()
                try:
                    accepted, _ = listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    continue
                except OSError as exc:
                    _log.warning("the file server cannot accept a connection: %s", exc)
                    self._stopping.wait(_AGAIN_S)
                    continue
                self._admit(accepted)

    def _admit(self, accepted: socket.socket) -> None:
        try:
            sock = self._prepared(accepted)
        except OSError:  # the peer has gone already
            accepted.close()
            return
        connection = self._connections.admit(sock)
        if connection is None:
            sock.close()
            return
        self._run(self._answerer.serve, connection)

    @cached_property
    def _answerer(self) -> Answerer:
        """Made by the acceptor's thread with the first connection: many nodes never copy a file."""
        from exo_mesh.models.file_server.answering import Answerer
        from exo_mesh.models.file_server.offered import OfferedModels

        offered = OfferedModels(self._models)
        times = {"head_s": self._head_s, "idle_s": self._idle_s}
        return Answerer(offered, self._connections, self._pace, self._stopping, **times)

    def _prepared(self, accepted: socket.socket) -> socket.socket:
        """Prepares an accepted socket. The TLS handshake happens later, in the thread of the connection."""
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._credentials is None:
            return accepted
        context = server_context(self._credentials.current)
        return context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
