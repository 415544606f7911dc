"""What systemd hears from a node."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from exo_mesh.cli.client.child_node import ChildNode, client_of
from exo_mesh.machine.systemd import Notifier, supervised, take_notifier
from tests.support.processes import QUIET_FLAGS, clean_environ


@contextmanager
def notify_socket(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(30)
        sock.bind(path)
        yield sock


def heard(sock: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in sock.recv(65536).decode().splitlines())


def heard_until(sock: socket.socket, key: str) -> dict[str, str]:
    while key not in (message := heard(sock)):
        pass
    return message


@pytest.mark.extended
def test_a_real_node_is_ready_beats_and_says_that_it_stops(tmp_path: Path) -> None:
    with notify_socket(str(tmp_path / "notify")) as sock:
        environ = {**clean_environ(tmp_path), "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        flags = ["--api-port", "0", "--offline", "--wait-for-peers", "2", *QUIET_FLAGS]
        node = ChildNode(flags, tmp_path / "log", environ)
        try:
            ready = heard(sock)
            client = client_of(node.wait_ready(60))
            assert (ready["READY"], ready["MAINPID"]) == ("1", str(node.pid))
            assert ready["STATUS"].startswith(f"waiting_for_peers; {client.url}; 0 other peers; 0 instances")
            assert heard(sock)["WATCHDOG"] == "1"
            # not ready for a load balancer, yet it answers
            health = client.get("/state")["health"]
            assert health["status"] == "waiting_for_peers"
            assert health["reasons"][0]["message"] == "0 of 2 other peers seen"
            client.post("/instance", {"model": "exo-mesh-demo"}, 60)
            runner = psutil.Process(node.pid).children(recursive=True)[0]
            assert {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & runner.environ().keys() == set()
            assert runner.environ()["HF_HUB_OFFLINE"] == "1"
            psutil.Process(node.pid).send_signal(signal.SIGTERM)
            assert heard_until(sock, "STOPPING")["STOPPING"] == "1"
        finally:
            node.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract socket names are Linux's")
def test_abstract_names_work() -> None:
    with notify_socket("\0exo-mesh-test-notify") as sock:
        Notifier("@exo-mesh-test-notify").tell(STATUS="two\nlines", READY=1)
        assert heard(sock) == {"STATUS": "two lines", "READY": "1"}


async def test_without_a_watchdog_only_the_status_is_kept_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exo_mesh.machine.systemd.STATUS_EVERY_S", 0.01)
    with notify_socket(str(tmp_path / "n")) as sock:
        sock.setblocking(False)

        async def next_message() -> dict[str, str]:
            data = await asyncio.get_running_loop().sock_recv(sock, 65536)
            return dict(line.split("=", 1) for line in data.decode().splitlines())

        async with supervised(Notifier(str(tmp_path / "n")), lambda: "fine"):
            assert (await next_message())["READY"] == "1"
            assert await next_message() == {"STATUS": "fine"}
        while (message := await next_message()) == {"STATUS": "fine"}:
            pass
        assert message == {"STOPPING": "1", "STATUS": "stopping"}


async def test_without_systemd_nothing_is_sent_or_started() -> None:
    before = asyncio.all_tasks()
    async with supervised(Notifier(), lambda: pytest.fail("nobody asks")):
        assert asyncio.all_tasks() == before


def test_a_socket_that_is_gone_is_survived(tmp_path: Path) -> None:
    Notifier(str(tmp_path / "nobody")).tell(READY=1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Notifier()),
        ({"NOTIFY_SOCKET": "/run/n"}, Notifier("/run/n")),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "30000000"}, Notifier("@n", 30.0)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "7"}, Notifier("/n", 1.0)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "8"}, Notifier("/n")),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "0"}, Notifier("/n")),
        ({"NOTIFY_SOCKET": "vsock:2:3", "WATCHDOG_USEC": "x"}, Notifier()),
    ],
)
def test_what_systemd_says_is_taken_out_of_the_environment(environ: dict[str, str], expected: Notifier) -> None:
    environ = {**environ, "PATH": "/bin"}
    assert take_notifier(environ, 7) == expected
    assert environ == {"PATH": "/bin"}
