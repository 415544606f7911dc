"""A real OpenSSH server on the loopback, whose user has a home of the test's own."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.peers import control_ports
from tests.support.processes import eventually

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextmanager
def ssh_server(folder: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """The command that reaches it, as EXO_MESH_SSH takes it. environ: what its shells have, HOME too. Skips the test
    where there is no OpenSSH server, or a user may not run one."""
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("no OpenSSH server here: apt-get install openssh-server")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (port,) = control_ports(1)
    lines = [
        f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {folder / 'host'}", f"PidFile {folder / 'pid'}",
        f"AuthorizedKeysFile {folder / 'user.pub'}", "StrictModes no", "UsePAM no", "PermitRootLogin yes",
        "PasswordAuthentication no", "SetEnv " + " ".join(f'"{key}={value}"' for key, value in environ.items()),
    ]  # fmt: skip
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # it wants an empty directory there
    log = folder / "sshd.log"
    with log.open("wb") as out:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=out)
    try:
        assert eventually(lambda: _listens(port), 10), log.read_text()
        known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        user = pwd.getpwuid(os.geteuid()).pw_name
        yield f"ssh -F none -o BatchMode=yes {known} -i {folder / 'user'} -p {port} -l {user}"
    finally:
        server.terminate()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
