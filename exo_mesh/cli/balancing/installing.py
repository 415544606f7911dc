"""Installs a new configuration: checks it with nginx, replaces the file atomically, reloads nginx."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from exo_mesh.base.printable import reason_of
from exo_mesh.errors import MeshError

CHECK_DEADLINE_S = 20.0
RELOAD_DEADLINE_S = 30.0
_WHERE = os.pathsep.join(("/usr/sbin", "/usr/local/sbin", "/usr/bin", "/usr/local/bin", "/opt/homebrew/bin"))


class ConfigurationRefused(MeshError):
    """nginx rejects the configuration, or could not be reloaded."""

    code = "nginx_refused"


def find_nginx() -> str:
    """The path of nginx; "" if it is not installed."""
    return shutil.which("nginx") or shutil.which("nginx", path=_WHERE) or ""


def check(text: str, nginx: str, *, has_site: bool) -> None:
    """Lets nginx check the text as part of an http block. Raises ConfigurationRefused with its first error.

    has_site: the text has a server that uses the upstream; otherwise a small one is added for the check.
    """
    server = "" if has_site else "server { listen 127.0.0.1:1; location / { proxy_pass http://exo_mesh; } }\n"
    with tempfile.TemporaryDirectory(prefix="exo-mesh-nginx-") as folder:
        Path(folder, "part.conf").write_text(text, encoding="utf-8")
        temporary = " ".join(f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy"))
        http = f"access_log off; {temporary}\ninclude {folder}/part.conf;\n{server}"
        main = f"pid {folder}/pid; error_log stderr;\nevents {{}}\nhttp {{\n{http}}}\n"
        Path(folder, "nginx.conf").write_text(main, encoding="utf-8")
        command = [nginx, "-t", "-q", "-p", folder, "-e", "stderr", "-c", f"{folder}/nginx.conf"]
        done = _run(command, CHECK_DEADLINE_S, "nginx -t")
        said = [line for line in done.stderr.splitlines() if "[emerg]" in line] or done.stderr.splitlines()
        if done.returncode and not all(
            "bind() to" in line for line in said
        ):  # only a bind() error: a port below 1024, checked without root
            reason = said[0].replace(f"{folder}/part.conf", "the new file") if said else f"exit code {done.returncode}"
            raise ConfigurationRefused(f"nginx rejects the new configuration: {reason}")


def replace_file(path: Path, text: str) -> bool:
    """Replaces the file atomically, so that a reader sees the old or the new text; returns whether it changed."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return True


def reload(command: str) -> None:
    """Runs the command without a shell. Raises ConfigurationRefused with its last line of output if it fails."""
    done = _run(shlex.split(command), RELOAD_DEADLINE_S, command)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ConfigurationRefused(f"`{command}` failed: {said[-1] if said else f'exit code {done.returncode}'}")


def _run(command: list[str], deadline_s: float, what: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise ConfigurationRefused(f"`{what}` did not end within {deadline_s:g} s") from exc
    except OSError as exc:
        raise ConfigurationRefused(f"`{what}` cannot be run: {reason_of(exc)}") from exc
