"""Mutual TLS for sockets of the ssl module, with the credentials of a mesh.

The ssl module reads certificates and keys from files only. Both go through pipes, so that the key is written to no
disk.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from exo_mesh.security.credentials import Credentials

_MAX_PEM_BYTES = 16 * 1024
"""What a pipe accepts on every system before it is read."""


@lru_cache(maxsize=8)
def server_context(own: Credentials) -> ssl.SSLContext:
    """Returns the context of a server whose clients must first present a certificate of the same mesh."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # every connection presents its certificate; none resumes a session
    return _prepared(context, own)


@lru_cache(maxsize=8)
def client_context(own: Credentials) -> ssl.SSLContext:
    """Returns the context of a client. Use MESH_DNS_NAME as the server's host name; addresses are not verified."""
    return _prepared(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), own)


def _prepared(context: ssl.SSLContext, own: Credentials) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=own.authority.decode())
    with _in_pipe(own.certificate) as certificate, _in_pipe(own.private_key) as key:
        context.load_cert_chain(certificate, key)
    return context


@contextmanager
def _in_pipe(pem: bytes) -> Iterator[str]:
    """Yields a path from which the text can be read once."""
    if len(pem) > _MAX_PEM_BYTES:
        raise ValueError(f"credentials of {len(pem)} bytes are larger than the limit of {_MAX_PEM_BYTES}")
    reader, writer = os.pipe()
    try:
        os.write(writer, pem)
        os.close(writer)
        yield f"/dev/fd/{reader}"
    finally:
        os.close(reader)
