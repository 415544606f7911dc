"""Opens all gRPC channels, makes calls over them by rows, and binds all servers: with mutual TLS if there are
credentials, otherwise in plain text."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import grpc
import grpc.aio

from exo_mesh.errors import TransportError
from exo_mesh.security.credentials import MESH_DNS_NAME, Credentials, CredentialSource
from exo_mesh.wire.channel_options import CLIENT_OPTIONS, SERVER_OPTIONS
from exo_mesh.wire.peer_call import AnyRow, PeerCall, PeerStream

Option = tuple[str, int | str]


async def keep_poller() -> None:
    """Start the thread in which grpc.aio waits for events, and keep it for the life of this process.

    Otherwise the thread ends with the last channel or server. If garbage collection frees that object, the collecting
    thread waits for the poller, which may wait for the collecting thread, and the process hangs. Must be awaited,
    because gRPC needs a running loop.
    """
    grpc.aio.init_grpc_aio()


def open_channel(
    target: str, credentials: CredentialSource | None = None, options: Sequence[Option] = ()
) -> grpc.aio.Channel:
    """A channel to "host:port". With credentials it connects only to a server of the same mesh.

    options: added to those of every channel; they replace options of the same name.
    """
    every = _with([*CLIENT_OPTIONS, *_proxy_option()], options)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=every)
    every.append(("grpc.ssl_target_name_override", MESH_DNS_NAME))
    return grpc.aio.secure_channel(target, _client_credentials(credentials.current), options=every)


def new_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (), options: Sequence[Option] = ()
) -> grpc.aio.Server:
    """A server that is not bound yet. options: as for a channel."""
    return grpc.aio.server(options=_with(SERVER_OPTIONS, options), interceptors=tuple(interceptors))


def bind(
    server: grpc.aio.Server,
    address: str,
    credentials: CredentialSource | None = None,
    on_connection: Callable[[], None] = lambda: None,
) -> int:
    """Listen on "host:port" (0: any free port). Returns the port; returns 0 or raises RuntimeError if the port is
    taken.

    With credentials a client must present a certificate of the same mesh before any call. `on_connection` is then
    called for each new connection, in a gRPC thread, before the client is authenticated.
    """
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _server_credentials(credentials, on_connection))


def _proxy_option() -> list[Option]:
    """Disables the `http_proxy` and `https_proxy` of the machine, through which gRPC would call even peers on the same
    network. Only `grpc_proxy`, which is meant for gRPC alone, is honoured."""
    named = os.environ.get("grpc_proxy")  # noqa: SIM112 - that is how gRPC spells it
    return [] if named else [("grpc.enable_http_proxy", 0)]


def _with(every: Sequence[Option], options: Sequence[Option]) -> list[Option]:
    return list({**dict(every), **dict(options)}.items())


@lru_cache(maxsize=8)
def _client_credentials(own: Credentials) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(own.authority, own.private_key, own.certificate)


def _server_credentials(source: CredentialSource, on_connection: Callable[[], None]) -> grpc.ServerCredentials:
    served = source.current

    def fetch() -> Any:
        """Called by gRPC, in its own thread, for each new connection; None: unchanged."""
        nonlocal served
        on_connection()
        if source.current is served:
            return None
        served = source.current
        return _shown(served)

    return grpc.dynamic_ssl_server_credentials(_shown(served), fetch, require_client_authentication=True)


def _shown(own: Credentials) -> Any:
    return grpc.ssl_server_certificate_configuration([(own.private_key, own.certificate)], own.authority)


def method_of(channel: grpc.aio.Channel, row: AnyRow, read: Any = None) -> Any:
    """The call over a channel, as gRPC makes it. read: reads a reply; by default without limits. Raises TransportError
    if the channel is closed: there gRPC would end the process."""
    if channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN:
        raise TransportError("the connection is closed")
    if isinstance(row, PeerCall):
        make: Any = channel.unary_unary
    else:
        make = channel.unary_stream if isinstance(row, PeerStream) else channel.stream_unary
    return make(row.path, row.request.SerializeToString, read or row.reply.FromString)
