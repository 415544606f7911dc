"""The shipped example of each proxy before some nodes, with the real program."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from exo_mesh.cli.client.child_node import free_port
from tests.support.nginx import NGINX, SHIPPED, shipped_nginx
from tests.support.processes import eventually

_WHERE = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin"
HAPROXY, CADDY = shutil.which("haproxy", path=_WHERE), shutil.which("caddy", path=_WHERE)
PROGRAMS = {"nginx": NGINX, "haproxy": HAPROXY, "caddy": CADDY}
PROXIES = list(PROGRAMS)
EXAMPLES = ("192.168.1.11:52415", "192.168.1.12:52415", "192.168.1.13:52415")


@contextmanager
def a_proxy(kind: str, folder: Path, addresses: Sequence[str]) -> Iterator[str]:
    """The address of a proxy before three nodes (host:port); skips the test if the program is not installed."""
    if PROGRAMS[kind] is None:
        pytest.skip(f"not installed: {kind}")
    if kind == "nginx":
        with shipped_nginx(folder, addresses) as proxy:
            yield proxy.url
        return
    folder.mkdir(parents=True, exist_ok=True)
    port, status = free_port(), free_port()
    text = (SHIPPED / {"haproxy": "haproxy.cfg", "caddy": "Caddyfile"}[kind]).read_text()
    for example, address in zip(EXAMPLES, addresses, strict=True):
        text = text.replace(example, address)
    if kind == "haproxy":
        text = text.replace("bind :52415", f"bind 127.0.0.1:{port}").replace("127.0.0.1:8404", f"127.0.0.1:{status}")
        command = [str(HAPROXY), "-db", "-f", str(folder / "config")]
    else:
        text = f"{{\n\tadmin 127.0.0.1:{status}\n}}\n" + text.replace(
            "\n:52415 {", f"\nhttp://:{port} {{\n\tbind 127.0.0.1"
        )
        command = [str(CADDY), "run", "--adapter", "caddyfile", "--config", str(folder / "config")]
    (folder / "config").write_text(text)
    environ = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_DATA_HOME": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
    try:
        assert eventually(lambda: _answers(port)), (folder / "log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
