"""Lists the web origins of a peer's HTTP API."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from exo_mesh.api.access import is_local_host

_HOST = re.compile(r"[a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\]")
"""The only form of names and addresses that is accepted for a header, because peers write their own records."""


def member_urls(api_url: str, addresses: Iterable[str], name: str) -> Iterator[str]:
    """Yields the web origins of a peer's API: the announced URL, then its other addresses (host:port) and its name.

    Only addresses and names that no public name server resolves are used. Otherwise a peer called example.com would
    allow the web pages of that site.
    """
    try:
        announced = urlsplit(api_url)
        scheme, port = announced.scheme, announced.port
    except ValueError:
        return
    if scheme not in ("http", "https") or not port:
        return
    hosts = [announced.netloc.rpartition(":")[0], *(address.rpartition(":")[0] for address in addresses)]
    hosts += [name, f"{name}.local"]
    for host in dict.fromkeys(host.lower() for host in hosts):
        if _HOST.fullmatch(host) and is_local_host(host.strip("[]")):
            yield f"{scheme}://{host}:{port}"
