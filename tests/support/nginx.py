"""A real nginx, with all its files in one folder."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exo_mesh.client.local_mesh import free_port
from tests.support.processes import eventually

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")

_ALWAYS = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {http}
}}
"""


@contextmanager
def nginx(folder: Path, http: str) -> Iterator[str]:
    """The address of an nginx. http: what it serves, with PORT for the port of the loopback that it is to listen on."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    config = _ALWAYS.format(folder=folder, http=http.replace("PORT", str(port)))
    (folder / "nginx.conf").write_text(config)
    assert NGINX is not None
    command = [NGINX, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        assert eventually(lambda: _answers(port)), (folder / "error.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
