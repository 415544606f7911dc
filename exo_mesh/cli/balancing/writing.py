"""Writes nginx configuration: the upstream from a list of nodes, and the site from the template `site.conf`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files

import msgspec

VARIANTS = {
    "least-conn": ("least_conn;  # the node with the fewest open requests",),
    "round-robin": ("# No directive here: nginx uses the nodes in turn.",),
    "ip-hash": (
        "# A client stays with one node. Behind another proxy all clients have one address: use least-conn there.",
        "ip_hash;",
    ),
    "weights": (
        "# The fewest open requests for its weight, which is its memory compared with the smallest node's.",
        "least_conn;",
    ),
}
"""Directives that set how nginx chooses a node, by name of the variant."""

MAX_WEIGHT = 20
_PASSIVE = "max_fails=3 fail_timeout=30s"
_MARK = re.compile(r"#@(\w+) ?")
_VALUE = re.compile(r"@(\w+)@")


class Upstream(msgspec.Struct, frozen=True):
    """A node as a server of nginx. address: host:port of its API. takes_new: it is neither draining nor stopping.

    memory_bytes: of its machine; 0 if unknown.
    """

    address: str
    name: str = ""
    scheme: str = "http"
    takes_new: bool = True
    memory_bytes: int = 0

    @property
    def is_loopback(self) -> bool:
        return self.address.startswith(("127.", "[::1]", "localhost:"))


class Site(msgspec.Struct, frozen=True):
    """Options of the site's template. tls_cert: path of a certificate; "": plain HTTP.

    limit: requests per second of one client address in nginx's notation ("5r/s"); "": no limit. adds_keys: add an
    Idempotency-Key to requests without one.
    """

    listen: str = "52415"
    name: str = "mesh.example.org"
    tls_cert: str = ""
    tls_key: str = ""
    limit: str = ""
    burst: int = 20
    status_port: int = 8081
    adds_keys: bool = True


def upstream_text(nodes: Sequence[Upstream], variant: str) -> str:
    """Writes the upstream block. nodes: at least one; their order is kept."""
    weights = _weights(nodes) if variant == "weights" else [1] * len(nodes)
    lines = ["upstream exo_mesh {", *(f"    {line}" for line in VARIANTS[variant])]
    lines.append("    zone exo_mesh 256k;  # all worker processes count together")
    for node, weight in zip(nodes, weights, strict=True):
        share = f" weight={weight}" if variant == "weights" else ""
        state = " down" if not node.takes_new else ""
        remark = node.name + ("" if node.takes_new else ", accepts no new requests")
        lines.append(f"    server {node.address} {_PASSIVE}{share}{state};" + (f"  # {remark}" if remark else ""))
    if variant != "ip-hash":
        lines += [
            "",
            "    # If all of them failed within 30 s, for example in a rolling restart: try them anyway.",
        ]
        lines += [f"    server {node.address} backup max_fails=0;" for node in nodes if node.takes_new]
    return "\n".join([*lines, "}", ""])


def site_text(site: Site, scheme: str = "http") -> str:
    """Fills the template `site.conf` with the options. scheme: of the nodes."""
    template = files("exo_mesh.cli.balancing").joinpath("site.conf").read_text(encoding="utf-8")
    parts = {"tls": bool(site.tls_cert), "plain": not site.tls_cert, "limit": bool(site.limit)}
    parts |= {"nodetls": scheme == "https", "keys": site.adds_keys, "own": not site.adds_keys}
    values = {
        "listen": site.listen,
        "name": site.name,
        "cert": site.tls_cert,
        "key": site.tls_key,
        "rate": site.limit,
        "burst": str(site.burst),
        "scheme": scheme,
        "status": str(site.status_port),
    }
    lines = []
    for line in template.splitlines():
        mark = _MARK.match(line)
        if mark is None or parts[mark[1]]:
            text = line if mark is None else line[mark.end() :]
            lines.append(_VALUE.sub(lambda found: values[found[1]], text))
    return "\n".join(lines) + "\n"


def _weights(nodes: Sequence[Upstream]) -> list[int]:
    """Weights by memory: 1 for the smallest machine, proportional for others; an unknown machine counts as smallest."""
    smallest = min((node.memory_bytes for node in nodes if node.memory_bytes), default=0)
    return [max(1, min(MAX_WEIGHT, round(node.memory_bytes / smallest))) if smallest else 1 for node in nodes]
