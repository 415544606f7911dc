"""Mutual TLS for sockets of the ssl module, with the credentials of a mesh.

The ssl module reads certificates and keys from files only. Both go through pipes, so that the key is on no disk.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from exo_mesh.security.credentials import Credentials

_MAX_PEM_BYTES = 16 * 1024
"""What a pipe takes on every system before somebody reads."""


@lru_cache(maxsize=8)
def server_context(own: Credentials) -> ssl.SSLContext:
    """A client must show a certificate of the same mesh before it may say anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # every connection shows its certificate; none resumes a session
    return _prepared(context, own)


@lru_cache(maxsize=8)
def client_context(own: Credentials) -> ssl.SSLContext:
    """To be used with MESH_DNS_NAME as the server's host name: that is checked, and no address."""
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
    """A path at which the text can be read once."""
    if len(pem) > _MAX_PEM_BYTES:
        raise ValueError(f"credentials of {len(pem)} bytes are larger than the {_MAX_PEM_BYTES} that are read")
    reader, writer = os.pipe()
    try:
        os.write(writer, pem)
        os.close(writer)
        yield f"/dev/fd/{reader}"
    finally:
        os.close(reader)
