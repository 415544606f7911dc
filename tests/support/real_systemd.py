"""A real systemd, process 1 of namespaces of its own: it sees stub targets and our units, and nothing of this machine.

/etc/systemd/system, /etc/default, /opt, /run, /tmp and /var are empty file systems of its own. The code under test is
at /opt/src, the Python of the tests at /opt/python, its packages at /opt/site: /opt/exo-mesh/bin/exo-mesh is that
`exo-mesh`, and a service that sees no home and no /tmp can run it. There is no network but a loopback.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.installs import ROOT

_BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /opt
mkdir -p /opt/src /opt/python /opt/site /opt/exo-mesh/bin
mount --bind "$SOURCE" /opt/src
mount --bind "$BASE" /opt/python
mount --bind "$SITE" /opt/site
printf '#!/bin/sh\\nexport LD_LIBRARY_PATH=/opt/python/lib PYTHONDONTWRITEBYTECODE=1\\n%s\\n%s\\n' \\
  'export PYTHONPATH=/opt/src:/opt/src/engines:/opt/site' \\
  "exec /opt/python/bin/$PYTHON -m exo_mesh.cli.main \"\\$@\"" > /opt/exo-mesh/bin/exo-mesh
chmod 755 /opt/exo-mesh/bin/exo-mesh
mkdir -p /etc/systemd/system /etc/default
for place in /run /tmp /var /etc/systemd/system /etc/default; do mount -t tmpfs -o mode=755 tmpfs $place; done
mkdir -p /run/units /var/tmp /var/lib /var/cache; chmod 1777 /tmp /var/tmp
mount -t proc proc /proc
if [ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ]; then
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
else
  umount -R /sys/fs/cgroup; mount -t tmpfs tmpfs /sys/fs/cgroup
  mkdir -p /sys/fs/cgroup/systemd; mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
fi
ip link set lo up
for name in sysinit basic multi-user network-online sleep shutdown exit umount final; do
  printf '[Unit]\\nDefaultDependencies=no\\nDescription=%s\\n' $name > /run/units/$name.target
done
mkdir /run/units/service.d; touch /run/services.log
printf '[Service]\\nStandardOutput=append:/run/services.log\\nStandardError=append:/run/services.log\\n' \\
  > /run/units/service.d/10-log.conf
printf 'StopWhenUnneeded=yes\\n' >> /run/units/sleep.target
export container=exo-mesh-tests SYSTEMD_UNIT_PATH=/run/units:/etc/systemd/system
unset SOURCE BASE SITE PYTHON
exec "$SYSTEMD" --system --unit=multi-user.target --log-target=console --show-status=no
"""
_SYSTEMD = next((path for path in ("/lib/systemd/systemd", "/usr/lib/systemd/systemd") if Path(path).exists()), "")
_READY_S = 20.0


def why_not() -> str:
    """Why no systemd can run here; "" if one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "process 1 of own namespaces needs root on Linux"
    if not _SYSTEMD or not all(map(shutil.which, ("systemctl", "unshare", "setpriv", "nsenter", "ip"))):
        return "systemd, util-linux or iproute2 is not installed"
    try:
        with _own_cgroup(), open(os.devnull, "w") as nothing:
            tried = subprocess.run([*_UNSHARE, "true"], stdout=nothing, stderr=nothing, check=False, timeout=10)
    except OSError as exc:
        return f"no cgroup can be made: {exc}"
    return "" if tried.returncode == 0 else "no namespaces can be made"


_UNSHARE = ["unshare", "--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--fork", "--kill-child"]


@contextmanager
def _own_cgroup() -> Iterator[Path]:
    """A cgroup for everything of that systemd, in the hierarchy that systemd uses."""
    base = Path("/sys/fs/cgroup")
    base = base if (base / "cgroup.controllers").exists() else base / "systemd"
    path = base / f"exo-mesh-test-{os.getpid()}"
    path.mkdir()
    try:
        yield path
    finally:
        end = time.monotonic() + 10
        for folder in sorted((one for one in path.rglob("*") if one.is_dir()), reverse=True):
            _remove(folder, end)
        _remove(path, end)


def _remove(folder: Path, end: float) -> None:
    while True:
        try:
            return folder.rmdir()
        except OSError:  # its last process is still ending
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


class RealSystemd:
    """run: a command beside that systemd."""

    def __init__(self, pid: int, log: Path) -> None:
        self._pid = pid
        self._log = log

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in its namespaces; check: it must succeed."""
        whole = ["nsenter", "-t", str(self._pid), "-a", "--", *command]
        environ = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "COLUMNS": "200"}
        done = subprocess.run(whole, capture_output=True, text=True, check=False, timeout=180, env=environ)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.log()}"
        return done

    def log(self) -> str:
        """The last lines of what it and its services said."""
        services = Path("/proc", str(self._pid), "root", "run", "services.log")
        logs = [path.read_text(errors="replace")[-4000:] for path in (self._log, services) if path.exists()]
        return "\n".join(logs)

    def write(self, path: str, text: str) -> None:
        """Write a file as it sees it."""
        self.run("sh", "-c", 'mkdir -p "$(dirname "$0")" && printf %s "$1" > "$0"', path, text)

    def show(self, unit: str, key: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", unit, f"--property={key}", "--value").stdout.strip()

    def wait(self, unit: str, key: str, *values: str, for_s: float = 60) -> str:
        """Wait until a property has one of these values."""
        end = time.monotonic() + for_s
        while (found := self.show(unit, key)) not in values:
            assert time.monotonic() < end, f"{unit}: {key}={found}, not {values}\n{self.log()}"
            time.sleep(0.1)
        return found


@contextmanager
def real_systemd(scratch: Path) -> Iterator[RealSystemd]:
    """Start it; at the end every process of it is killed."""
    log = scratch / "systemd.log"
    python, site = Path(sys.executable).resolve().name, sysconfig.get_path("purelib")
    places = {"SOURCE": str(ROOT), "BASE": sys.base_prefix, "SITE": site, "PYTHON": python, "SYSTEMD": _SYSTEMD}
    environ = {**os.environ, **places}
    with _own_cgroup() as cgroup, log.open("w") as output:
        enter = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
        # setpriv: it ends with the tests, also when they are killed
        command = ["sh", "-c", enter, str(cgroup), "setpriv", "--pdeathsig", "KILL", *_UNSHARE, "bash", "-c", _BOOT]
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ)
        try:
            systemd = RealSystemd(_first_child(started), log)
            end = time.monotonic() + _READY_S
            while systemd.run("systemctl", "is-system-running", check=False).stdout.strip() != "running":
                assert started.poll() is None and time.monotonic() < end, systemd.log()
                time.sleep(0.1)
            yield systemd
        finally:
            started.kill()  # unshare takes its child along, process 1, and that the whole namespace
            started.wait()


def _first_child(started: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    end = time.monotonic() + _READY_S
    while not (found := children.read_text().split()):
        assert started.poll() is None and time.monotonic() < end, "unshare has ended"
        time.sleep(0.02)
    return int(found[0])
