"""Malformed requests: none of them gets what it should not, harms the server, or makes it fail."""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections import Counter
from pathlib import Path

import pytest

from exo_mesh.models.file_server.messages import path_of
from exo_mesh.models.file_server.requests import END_OF_HEAD
from tests.support.file_servers import DIGEST, NAME, WEIGHTS, Served, serving
from tools.fuzz.mutate import mutated

ANSWERS = {"200", "206", "400", "404", "405", "412", "416", "closed", "incomplete"}


def request(rng: random.Random) -> bytes:
    path = path_of(NAME, rng.choice(("", WEIGHTS, "config.json", "..", "no.json")))
    lines = [f"GET {path} HTTP/1.1", "Host: peer"]
    lines += rng.choice(([], [f"Range: bytes={rng.randrange(2000)}-{rng.choice(('', rng.randrange(2000)))}"]))
    lines += rng.choice(([], [f'If-Match: "{rng.choice((DIGEST, "x"))}"']))
    lines += rng.choice(([], [f"Exo-Wait-S: {rng.choice(('0.01', 'x', '-1', '1e9'))}"]))
    return "\r\n".join([*lines, "", ""]).encode()


def answer(served: Served, message: bytes) -> str:
    """Its status; "closed" if there was none, "incomplete" if the server waits for the rest."""
    with socket.create_connection(("127.0.0.1", served.port), 10.0) as sock:
        try:
            sock.sendall(message)
            if END_OF_HEAD not in message:
                return "incomplete"
            head = sock.recv(100)
        except ConnectionError:
            return "closed"
        return head[9:12].decode() if head else "closed"


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_malformed_requests_do_no_harm(tmp_path: Path, count: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(7)
    with (
        serving(tmp_path / "m", num_bytes=1500) as served,
        caplog.at_level(logging.WARNING, "exo_mesh.models.file_server"),
    ):
        got = Counter(answer(served, mutated(rng, request(rng))) for _ in range(count))
        assert set(got) <= ANSWERS and len(got) > 5, got
        assert served.get(path_of(NAME, WEIGHTS))[::2] == (200, served.content)
        assert not caplog.records
        assert len([thread for thread in threading.enumerate() if thread.name == "peer-files"]) <= 33
