"""What `exo-mesh nginx-config` was asked for, and the doing of it: once, or until Ctrl-C."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from exo_mesh.balancing.installing import check, find_nginx, reload, replace_file
from exo_mesh.balancing.members import LiveMembers
from exo_mesh.balancing.writing import VARIANTS, Site, Upstream, site_text, upstream_text
from exo_mesh.client.api_client import ApiClient
from exo_mesh.errors import InputError, MeshError

EVERY_S = 2.0
_HEAD = "# Written by `exo-mesh nginx-config`. Changes are lost if it runs with --watch.\n"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`--variant`, `--whole` and what belongs to it, `--output`, `--watch`, `--reload`."""
    parser.add_argument("--variant", choices=list(VARIANTS), default="least-conn", help="how nginx chooses a node")
    parser.add_argument("--output", metavar="FILE", help="write this file instead of printing")
    parser.add_argument("--watch", action="store_true", help="go on, and write it again when the mesh changes")
    parser.add_argument("--every", metavar="SECONDS", type=float, default=EVERY_S, help="pause between two looks (2)")
    parser.add_argument("--reload", metavar="CMD", help="run this after a change, such as 'systemctl reload nginx'")
    site = parser.add_argument_group("the whole configuration")
    site.add_argument("--whole", action="store_true", help="the site as well, not only the nodes")
    site.add_argument("--listen", metavar="[HOST:]PORT", help="where nginx listens (52415; with TLS 443)")
    site.add_argument("--server-name", metavar="NAME", default="mesh.example.org", help="the public name, for TLS")
    site.add_argument("--tls-cert", metavar="FILE", default="", help="serve HTTPS with this certificate")
    site.add_argument("--tls-key", metavar="FILE", default="", help="the key of that certificate")
    site.add_argument("--limit", metavar="RATE", default="", help="requests of one address, such as 5r/s or 30r/m")
    site.add_argument("--status-port", metavar="PORT", type=int, default=8081, help="of stub_status, local only (8081)")
    text = "add no Idempotency-Key to requests without one; such a request is never sent to a second node"
    site.add_argument("--own-keys-only", action="store_true", help=text)


def write_config(args: argparse.Namespace, client: ApiClient) -> None:
    """Ask the mesh once, or until Ctrl-C. client: of the node that was named."""
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
    """The file, and whether nginx has been reloaded since it changed. site: None: the upstream only."""

    path: Path
    variant: str
    site: Site | None
    reload_command: str
    nginx: str
    _is_reload_due: bool = field(default=False, init=False)

    def update(self, nodes: list[Upstream]) -> str:
        """Bring the file up to date and reload if that changed it; says in one line what was done, "" for nothing."""
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
        checked = "" if self.nginx or not changed else "; not checked, as nginx is not installed here"
        return done + checked + ("; reloaded" if reloads else "")

    def _has(self, text: str) -> bool:
        return self.path.exists() and self.path.read_text(encoding="utf-8") == text


def _watch(read: Callable[[], list[Upstream]], written: WrittenConfig, every_s: float) -> NoReturn:
    """Until Ctrl-C. What goes wrong is said once, and the file stays as it is."""
    said = ""
    while True:
        try:
            now = written.update(able(read()))
        except (MeshError, OSError) as exc:
            now = f"{written.path} stays as it is: {exc}"
        if now != said:
            sys.stderr.write(now + "\n")
            sys.stderr.flush()
        said = now.removesuffix("; reloaded")
        time.sleep(every_s)


def able(nodes: list[Upstream]) -> list[Upstream]:
    """The nodes, if any of them takes requests. nginx refuses an upstream without a server, and one with none that is
    up answers nobody."""
    if not nodes:
        raise MeshError("the mesh names no node with an HTTP API that can be reached from elsewhere")
    if not any(node.takes_new for node in nodes):
        raise MeshError(f"none of the {len(nodes)} nodes of the mesh takes new requests")
    return nodes


def _text(nodes: list[Upstream], variant: str, site: Site | None) -> str:
    upstream = _HEAD + upstream_text(nodes, variant)
    return upstream if site is None else f"{upstream}\n{site_text(site, nodes[0].scheme)}"


def _counted(nodes: list[Upstream]) -> str:
    down = sum(not node.takes_new for node in nodes)
    return f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}" + (f", {down} of them take nothing new" if down else "")


def _site_of(args: argparse.Namespace) -> Site | None:
    """The wishes for the site; None without --whole. Raises InputError for values that nginx would misread."""
    if not args.whole:
        return None
    if bool(args.tls_cert) != bool(args.tls_key):
        raise InputError("--tls-cert and --tls-key belong together", param="tls-cert")
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
            raise InputError(f"--{name} {value!r} cannot be written into a configuration of nginx", param=name)
    if not 0 < args.status_port < 65536 or args.status_port == 8080:
        raise InputError("--status-port must be a port other than 8080, which is RKLLAMA's", param="status-port")
    return Site(
        listen,
        args.server_name,
        args.tls_cert,
        args.tls_key,
        args.limit,
        status_port=args.status_port,
        adds_keys=not args.own_keys_only,
    )
