"""The certificate authorities that this machine trusts, read when a client first needs them.

aiohttp reads them twice while it is imported, for contexts that only its HTTPS clients use: 60 ms of the start of a
node, which is a server.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_FILE = "SSL_CERT_FILE"
"""The variable that names the file of authorities to OpenSSL."""


@contextmanager
def authorities_unread() -> Iterator[None]:
    """While this is open, a new default context trusts nobody. Import aiohttp in here, and give each of its clients
    the context that `trusted` returns."""
    before = os.environ.get(_FILE)
    os.environ[_FILE] = os.devnull
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FILE]
        else:
            os.environ[_FILE] = before


async def trusted() -> ssl.SSLContext:
    """A TLS context for clients that trusts the authorities of this machine."""
    return await asyncio.to_thread(read_authorities)


@cache
def read_authorities() -> ssl.SSLContext:
    """The same context for callers that may block: the first call takes some 30 ms."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
