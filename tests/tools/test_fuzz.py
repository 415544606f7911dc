"""A tenth of what `python -m tools.fuzz all` sends: no node takes harm."""

from __future__ import annotations

import random

import pytest

from exo_mesh.proto import control_pb2 as pb
from tools.fuzz.__main__ import TARGETS, fuzz
from tools.fuzz.mutate import mutated, random_message
from tools.fuzz.targets.http import is_complete, request_bytes

TENTH = {"tls": 1000, "frames": 1000, "files": 400}
"""tls and frames: of 10,000; a stream of frames that is well lasts for half a second. files: a fiftieth, for a fetcher
waits before it asks a source again."""


@pytest.mark.extended
@pytest.mark.parametrize("target", [target for target in TARGETS if target != "generate"])  # tests/tools/test_starts.py
def test_a_tenth_of_the_messages_does_no_harm(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert fuzz(target, 1, TENTH.get(target, 2000), 1.0) == []
    assert f"{target}: seed 1" in capfd.readouterr().out


def test_a_seed_makes_the_same_messages_again() -> None:
    def made() -> list[bytes]:
        rng = random.Random(3)
        message = random_message(rng, pb.ExchangeRequest).SerializeToString(deterministic=True)
        return [mutated(rng, message) for _ in range(50)] + [request_bytes(rng, number) for number in range(50)]

    assert made() == made() and len(set(made())) > 60


def test_a_request_that_is_cut_short_is_known_as_one() -> None:
    whole = b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
    assert is_complete(whole)
    assert not any(is_complete(whole[:stop]) for stop in range(len(whole)))
