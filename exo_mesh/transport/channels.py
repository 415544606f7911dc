"""Where every gRPC channel is opened and every server bound: mutual TLS with credentials, plain without."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import grpc
import grpc.aio

from exo_mesh.security.credentials import MESH_DNS_NAME, Credentials
from exo_mesh.transport.channel_options import CLIENT_OPTIONS, SERVER_OPTIONS

Option = tuple[str, int | str]


def open_channel(
    target: str, credentials: Credentials | None = None, options: Sequence[Option] = ()
) -> grpc.aio.Channel:
    """A channel to "host:port". With credentials only a server of the same mesh is talked to."""
    every: list[Option] = [*CLIENT_OPTIONS, *options]
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=every)
    every.append(("grpc.ssl_target_name_override", MESH_DNS_NAME))
    return grpc.aio.secure_channel(target, _client_credentials(credentials), options=every)


def new_server() -> grpc.aio.Server:
    """A server that is not bound yet."""
    return grpc.aio.server(options=SERVER_OPTIONS)


def bind(server: grpc.aio.Server, address: str, credentials: Credentials | None = None) -> int:
    """Listen on "host:port" (0: any free port); answers the port, 0 or RuntimeError if it is taken.

    With credentials a client must show a certificate of the same mesh before it may say anything.
    """
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _server_credentials(credentials))


@lru_cache(maxsize=8)
def _client_credentials(own: Credentials) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(own.authority, own.private_key, own.certificate)


@lru_cache(maxsize=8)
def _server_credentials(own: Credentials) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(own.private_key, own.certificate)], root_certificates=own.authority, require_client_auth=True
    )
