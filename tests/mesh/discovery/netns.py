"""Hosts that are network namespaces, joined by bridges in one more namespace. Nothing is added to the machine's own.

Everything is deleted at the end, whatever happens.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from exo_mesh.security.local_token import FILE_NAME as TOKEN_FILE

_numbers = itertools.count()

_GETTER = """
import http.client, os, sys
for line in sys.stdin:
    try:
        headers = {"Content-Type": "application/json"}
        if os.path.exists(sys.argv[1]):
            headers["Authorization"] = "Bearer " + open(sys.argv[1]).read().strip()
        path, _, body = line.strip().partition(" ")
        c = http.client.HTTPConnection("127.0.0.1", 52415, timeout=60 if body else 3)
        c.request("POST" if body else "GET", path, body or None, headers)
        print(c.getresponse().read().decode().replace("\\n", " "), flush=True)
        c.close()
    except (OSError, http.client.HTTPException):
        print("null", flush=True)
"""


def why_not() -> str:
    """Why this machine cannot have namespaces; "" if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is missing"
    probe = f"exom-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return f"no namespaces here: {made.stderr.strip()}" if made.returncode else ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def measured(condition: Callable[[], object], deadline_s: float, what: str) -> float:
    """Seconds until the condition holds; the test fails if that is not before the deadline."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < deadline_s, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)
    took_s = time.monotonic() - begin
    print(f"{what}: {took_s:.2f} s")
    return took_s


class Host:
    """A namespace with one interface `ethN` per network it is in; 10.77.N.I is its address there."""

    def __init__(self, net: Network, index: int, networks: tuple[int, ...], home: Path) -> None:
        self.net = net
        self.index = index
        self.name = f"h{index}"
        self.ns = f"{net.prefix}-{self.name}"
        self.home = home
        self.node: subprocess.Popen[bytes] | None = None
        self._getter: subprocess.Popen[str] | None = None
        ip("netns", "add", self.ns)
        ip("-n", self.ns, "link", "set", "lo", "up")
        for number in networks:
            port = self.port(number)
            ip("-n", net.switch, "link", "add", port, "type", "veth", "peer", "name", f"eth{number}",
               "netns", self.ns)  # fmt: skip
            ip("-n", net.switch, "link", "set", port, "master", f"br{number}", "up")
            ip("-n", self.ns, "addr", "add", f"10.77.{number}.{index}/24", "dev", f"eth{number}")
            ip("-n", self.ns, "link", "set", f"eth{number}", "up")
        ip("-n", self.ns, "route", "add", "default", "dev", f"eth{networks[0]}")

    def port(self, number: int) -> str:
        """The name of its port at the bridge of a network."""
        return f"p{self.index}n{number}"

    def pids(self, module: str) -> set[int]:
        """Live processes in this namespace that run `python -m module`, whoever their parent is by now."""
        listed = subprocess.run(["ip", "netns", "pids", self.ns], check=True, capture_output=True, text=True).stdout
        found = set()
        for pid in map(int, listed.split()):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if module in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(pid)
        return found

    def popen(self, *argv: str, **options: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen(["ip", "netns", "exec", self.ns, *argv], **options)
        self.net.processes.append(process)
        return process

    def start(self, *flags: str) -> None:
        """Start a node; does not wait."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith("EXO_MESH_")}
        with (self.home.parent / f"{self.name}.log").open("ab") as log:
            self.node = self.popen(
                *(sys.executable, "-m", "exo_mesh.cli.main", "serve", "--home", str(self.home), "--name", self.name),
                *("--engine", "dummy", *flags),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
            )

    def get(self, path: str) -> Any:
        """What the API of this host's node says; None if it does not answer."""
        return self._ask(path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """As get."""
        return self._ask(f"{path} {json.dumps(body)}")

    def _ask(self, line: str) -> Any:
        if self._getter is None:
            command = (sys.executable, "-S", "-c", _GETTER, str(self.home / TOKEN_FILE))
            self._getter = self.popen(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._getter.stdin and self._getter.stdout
        self._getter.stdin.write(line + "\n")
        self._getter.stdin.flush()
        return json.loads(self._getter.stdout.readline() or "null")

    def is_up(self) -> bool:
        return self.get("/healthz") is not None

    def sees(self) -> list[str]:
        """The names of the peers in the view of this host's node, its own included."""
        topology = self.get("/v1/topology")
        return sorted(peer["name"] for peer in topology["peers"]) if topology else []

    def link(self) -> dict[str, Any]:
        """The first link to another peer."""
        topology = self.get("/v1/topology")
        links: list[dict[str, Any]] = topology["links"] if topology else []
        return links[0] if links else {}

    def log(self) -> str:
        return (self.home.parent / f"{self.name}.log").read_text(errors="replace")

    def kill(self, signum: int = signal.SIGKILL) -> None:
        assert self.node is not None
        self.node.send_signal(signum)
        if signum == signal.SIGKILL:
            self.node.wait()


class Network:
    """Bridges br0, br1, … in a namespace that is the switch."""

    def __init__(self, folder: Path) -> None:
        self.prefix = f"exom{os.getpid()}-{next(_numbers)}"
        self.switch = f"{self.prefix}-sw"
        self.folder = folder
        self.hosts: list[Host] = []
        self.processes: list[subprocess.Popen[Any]] = []

    def build(self, num_hosts: int, num_networks: int) -> list[Host]:
        ip("netns", "add", self.switch)
        for number in range(num_networks):
            ip("-n", self.switch, "link", "add", f"br{number}", "type", "bridge", "mcast_snooping", "0")
            ip("-n", self.switch, "link", "set", f"br{number}", "up")
        for index in range(1, num_hosts + 1):
            self.hosts.append(Host(self, index, tuple(range(num_networks)), self.folder / f"home{index}"))
        return self.hosts

    def divide(self, hosts: list[Host]) -> None:
        """Move hosts to a second bridge of network 0, joined to the first by one cable, which `cut` and `heal` pull
        out and put back. No interface of any host goes down."""
        ip("-n", self.switch, "link", "add", "br-far", "type", "bridge", "mcast_snooping", "0")
        ip("-n", self.switch, "link", "set", "br-far", "up")
        ip("-n", self.switch, "link", "add", "cable", "type", "veth", "peer", "name", "cable-far")
        ip("-n", self.switch, "link", "set", "cable", "master", "br0", "up")
        ip("-n", self.switch, "link", "set", "cable-far", "master", "br-far", "up")
        for host in hosts:
            ip("-n", self.switch, "link", "set", host.port(0), "master", "br-far")

    def cut(self) -> None:
        ip("-n", self.switch, "link", "set", "cable", "down")

    def heal(self) -> None:
        ip("-n", self.switch, "link", "set", "cable", "up")

    def delete(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True).stdout
        for line in listed.splitlines():
            if line.startswith(f"{self.prefix}-"):
                subprocess.run(["ip", "netns", "del", line.split()[0]], check=False, capture_output=True)


@contextmanager
def network(folder: Path, num_hosts: int, num_networks: int = 1) -> Iterator[list[Host]]:
    """Hosts 1…num_hosts, each in every network."""
    net = Network(folder)
    try:
        yield net.build(num_hosts, num_networks)
    finally:
        net.delete()
