"""Converts credentials to the messages of the runner pipe and back."""

from __future__ import annotations

from exo_mesh.security.credentials import Credentials
from exo_mesh.wire.proto import runner_pb2 as pb


def tls_to_proto(own: Credentials | None) -> pb.TlsCredentials | None:
    """The message; None, an absent field, in an open mesh."""
    if own is None:
        return None
    return pb.TlsCredentials(authority=own.authority, certificate=own.certificate, private_key=own.private_key)


def tls_from_proto(tls: pb.TlsCredentials) -> Credentials:
    return Credentials(tls.authority, tls.certificate, tls.private_key)
