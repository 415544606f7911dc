"""A real nginx, with all its files in one folder."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from exo_mesh.cli.balancing.writing import Upstream, upstream_text
from exo_mesh.cli.client.child_node import free_port
from tests.support.processes import eventually

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
SHIPPED = Path(__file__).resolve().parents[2] / "nginx"

_ALWAYS = """
daemon off; worker_processes {workers}; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {http}
}}
"""


@contextmanager
def nginx(folder: Path, http: str, workers: int = 1) -> Iterator[str]:
    """The address of an nginx. http: what it serves, with PORT for the port of the loopback that it is to listen on."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    config = _ALWAYS.format(folder=folder, workers=workers, http=http.replace("PORT", str(port)))
    (folder / "nginx.conf").write_text(config)
    process = subprocess.Popen(nginx_command(folder), stdin=subprocess.DEVNULL)
    try:
        assert eventually(lambda: _answers(port)), (folder / "error.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def nginx_command(folder: Path) -> list[str]:
    """The command of the nginx whose files are in a folder; with `-s reload` behind it, it reloads."""
    assert NGINX is not None
    return [NGINX, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]


@dataclass(frozen=True, slots=True)
class Passed:
    """A line of the access log: the status that the client got, the nodes that were asked, and theirs."""

    path: str
    status: int
    nodes: tuple[str, ...]
    statuses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShippedNginx:
    """An nginx with the configuration of nginx/. status_url: of its stub_status."""

    url: str
    status_url: str
    folder: Path

    def passed(self) -> list[Passed]:
        """All requests that have ended."""
        found = []
        for line in (self.folder / "access.log").read_text().splitlines():
            match = re.search(r'"\S+ (\S+)" (\d+) \d+ \S+ s; nodes: (.*); statuses: (.*)$', line)
            assert match, line
            nodes, statuses = (tuple(re.split(r", | : ", text)) for text in match.group(3, 4))
            found.append(Passed(match[1], int(match[2]), nodes, statuses))
        return found


@contextmanager
def shipped_nginx(
    folder: Path, addresses: Sequence[str], *, site: str = "exo-mesh.conf", upstream: Path | None = None
) -> Iterator[ShippedNginx]:
    """An nginx before these nodes (host:port), with the files that users get. Only the ports and the log are others.

    upstream: a file with the nodes that is there already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if upstream is None:
        upstream = folder / "upstream.conf"
        upstream.write_text(upstream_text([Upstream(address) for address in addresses], "least-conn"))
    status = free_port()
    text = (SHIPPED / site).read_text().replace("127.0.0.1:8081", f"127.0.0.1:{status}", 1)
    text = text.replace("listen 52415;", "listen 127.0.0.1:PORT;", 1).replace(
        "listen 443 ssl;", "listen 127.0.0.1:PORT ssl;", 1
    )
    text = text.replace("listen 80;", f"listen 127.0.0.1:{status};", 1)
    text = text.replace("/etc/letsencrypt/live/mesh.example.org", str(folder))
    text = text.replace("# access_log /var/log/nginx/exo-mesh.log", f"access_log {folder}/access.log", 1)
    with nginx(folder, f"include {upstream};\n{text}", workers=2) as url:
        yield ShippedNginx(url, f"http://127.0.0.1:{status}/stub_status", folder)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
