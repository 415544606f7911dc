"""Flags and work of `exo-mesh nginx-config`: writes the configuration once, or at each change until Ctrl-C."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from exo_mesh.base.printable import counted, quoted, reason_of
from exo_mesh.cli.balancing.installing import check, find_nginx, reload, replace_file
from exo_mesh.cli.balancing.members import LiveMembers
from exo_mesh.cli.balancing.writing import VARIANTS, Site, Upstream, site_text, upstream_text
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import seconds
from exo_mesh.errors import InputError, MeshError

EVERY_S = 2.0
_HEAD = "# Written by `exo-mesh nginx-config`. Changes are lost if it runs with --watch.\n"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--variant`, `--site` and its flags, `--output`, `--watch`, `--reload`."""
    parser.add_argument("--variant", choices=list(VARIANTS), default="least-conn", help="how nginx chooses a node")
    parser.add_argument("--output", metavar="FILE", help="write to this file instead of standard output")
    parser.add_argument("--watch", action="store_true", help="keep running, and rewrite the file when the mesh changes")
    parser.add_argument(
        "--every", metavar="SECONDS", type=seconds, default=EVERY_S, help="pause between two checks of the mesh (2)"
    )
    parser.add_argument(
        "--reload", metavar="CMD", help="run this command after a change, such as 'systemctl reload nginx'"
    )
    site = parser.add_argument_group("the site")
    site.add_argument(
        "--site",
        "--whole",
        dest="whole",
        action="store_true",
        help="write the server blocks, too: a file for conf.d or sites-enabled, inside http { } of nginx.conf",
    )
    site.add_argument("--listen", metavar="[HOST:]PORT", help="address on which nginx listens (52415; with TLS 443)")
    site.add_argument("--server-name", metavar="NAME", default="mesh.example.org", help="public host name, for TLS")
    site.add_argument("--tls-cert", metavar="FILE", default="", help="serve HTTPS with this certificate")
    site.add_argument("--tls-key", metavar="FILE", default="", help="private key of that certificate")
    site.add_argument(
        "--limit", metavar="RATE", default="", help="most requests per client address, such as 5r/s or 30r/m"
    )
    site.add_argument("--status-port", metavar="PORT", type=int, default=8081, help="local port of stub_status (8081)")
    text = "do not add an Idempotency-Key to requests without one; such a request is never retried on another node"
    site.add_argument("--own-keys-only", action="store_true", help=text)


def write_config(args: argparse.Namespace, client: ApiClient) -> None:
    """Writes the configuration once, or with --watch until Ctrl-C. client: of the node called."""
    site = _site_of(args)
    if (args.watch or args.reload) and not args.output:
        raise InputError("--watch and --reload need --output FILE", param="output")
    if not 0.2 <= args.every <= 3600:
        raise InputError(f"--every must be 0.2 to 3600 seconds, not {args.every:g}", param="every")
    members = LiveMembers(client)
    if not args.output:
        sys.stdout.write(_text(able(members.read()), args.variant, site))
        return
    written = WrittenConfig(Path(args.output), args.variant, site, args.reload or "", find_nginx())
    if args.watch:
        _watch(members.read, written, args.every)
    sys.stdout.write(written.update(able(members.read())) + "\n")


@dataclass
class WrittenConfig:
    """The written file, and whether nginx must still be reloaded. site: None to write the upstream only."""

    path: Path
    variant: str
    site: Site | None
    reload_command: str
    nginx: str
    _is_reload_due: bool = field(default=False, init=False)

    def update(self, nodes: list[Upstream]) -> str:
        """Updates the file, reloads nginx if the file changed, and returns one line that says what was done."""
        text = _text(nodes, self.variant, self.site)
        if self.nginx and not self._has(text):
            check(text, self.nginx, has_site=self.site is not None)
        changed = replace_file(self.path, text)
        self._is_reload_due = (self._is_reload_due or changed) and bool(self.reload_command)
        reloads = self._is_reload_due
        if reloads:
            reload(self.reload_command)
            self._is_reload_due = False
        done = f"{self.path}: {_counted(nodes)}" if changed else f"{self.path} is up to date: {_counted(nodes)}"
        checked = "" if self.nginx or not changed else "; not checked, because nginx is not installed here"
        return done + checked + ("; reloaded" if reloads else "")

    def _has(self, text: str) -> bool:
        return self.path.exists() and self.path.read_text(encoding="utf-8") == text


def _watch(read: Callable[[], list[Upstream]], written: WrittenConfig, every_s: float) -> NoReturn:
    """Updates the file until Ctrl-C. Reports each error once; the file then stays unchanged."""
    said = ""
    while True:
        try:
            now = written.update(able(read()))
        except (MeshError, OSError) as exc:
            now = f"{written.path} is unchanged: {reason_of(exc)}"
        if now != said:
            sys.stderr.write(now + "\n")
            sys.stderr.flush()
        said = now.removesuffix("; reloaded")
        time.sleep(every_s)


def able(nodes: list[Upstream]) -> list[Upstream]:
    """Returns the nodes. Raises MeshError if none accepts requests: nginx rejects an upstream without servers, and one
    whose servers are all down serves no client."""
    if not nodes:
        raise MeshError("no node of the mesh has an HTTP API that other machines can reach")
    if not any(node.takes_new for node in nodes):
        raise MeshError(f"none of the {len(nodes)} nodes of the mesh accepts new requests")
    return nodes


def _text(nodes: list[Upstream], variant: str, site: Site | None) -> str:
    upstream = _HEAD + upstream_text(nodes, variant)
    return upstream if site is None else f"{upstream}\n{site_text(site, nodes[0].scheme)}"


def _counted(nodes: list[Upstream]) -> str:
    down = sum(not node.takes_new for node in nodes)
    return counted(len(nodes), "node") + (f", {down} not accepting new requests" if down else "")


def _site_of(args: argparse.Namespace) -> Site | None:
    """The options of the site; None without --site. Raises InputError for values that nginx would misread."""
    if not args.whole:
        return None
    if bool(args.tls_cert) != bool(args.tls_key):
        raise InputError("--tls-cert and --tls-key need each other: give both", param="tls-cert")
    listen = args.listen or ("443" if args.tls_cert else "52415")
    rules = {
        "listen": (listen, r"([\w.:\[\]*-]+:)?\d{1,5}"),
        "server-name": (args.server_name, r"[\w.*-]+"),
        "limit": (args.limit, r"(\d+r/[sm])?"),
        "tls-cert": (args.tls_cert, r"[^\s;{}\"'$#]*"),
        "tls-key": (args.tls_key, r"[^\s;{}\"'$#]*"),
    }
    for name, (value, rule) in rules.items():
        if not re.fullmatch(rule, value):
            raise InputError(f"--{name} {quoted(value)} cannot be written into a configuration of nginx", param=name)
    if not 0 < args.status_port < 65536 or args.status_port == 8080:
        raise InputError(
            f"--status-port {args.status_port} must be 1 to 65535, and not 8080, which is RKLLAMA's",
            param="status-port",
        )
    return Site(
        listen,
        args.server_name,
        args.tls_cert,
        args.tls_key,
        args.limit,
        status_port=args.status_port,
        adds_keys=not args.own_keys_only,
    )
