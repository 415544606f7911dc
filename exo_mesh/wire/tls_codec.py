"""Converts credentials to the messages of the runner pipe and back."""

from __future__ import annotations

from exo_mesh.security.credentials import Credentials
from exo_mesh.wire.message_codec import Codec
from exo_mesh.wire.proto import runner_pb2 as pb

TLS = Codec(Credentials, pb.TlsCredentials)

tls_from_proto = TLS.read


def tls_to_proto(own: Credentials | None) -> pb.TlsCredentials | None:
    """The message; None, an absent field, in an open mesh."""
    return None if own is None else TLS.write(own)
