"""A tenth of what `python -m tools.fuzz all` sends: no node takes harm."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from exo_mesh.wire.proto import control_pb2 as pb
from tools.fuzz import hostile_peer
from tools.fuzz.__main__ import CONTENT, TARGETS, fuzz
from tools.fuzz.models import Edit, write_cases
from tools.fuzz.mutate import mutated, random_message
from tools.fuzz.targets import headers, large, templates, values
from tools.fuzz.targets.http import is_complete, request_bytes

TENTH = {"tls": 1000, "frames": 1000, "files": 400, "bodies": 1000, "hello": 1000}
"""tls and frames: of 10,000; a stream of frames that is well lasts for half a second. files: a fiftieth, for a fetcher
waits before it asks a source again. bodies and hello: a twentieth, for each takes 5 to 8 ms of CPU."""


@pytest.mark.extended
@pytest.mark.parametrize("target", [target for target in TARGETS if target != "generate"])  # tests/tools/test_starts.py
def test_a_tenth_of_the_messages_does_no_harm(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert fuzz(target, 1, TENTH.get(target, 2000), 1.0) == []
    assert f"{target}: seed 1" in capfd.readouterr().out


@pytest.mark.extended
@pytest.mark.parametrize("target", CONTENT)
def test_hostile_content_does_no_harm(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert fuzz(target, 1, {"control": 200, "pieces": 2, "large": 3}.get(target), 1.0) == []
    assert f"{target}: seed 1, cases from 0" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_peer_with_twelve_hostile_models_does_no_harm() -> None:
    assert hostile_peer.run(1.0) == []


@pytest.mark.parametrize("edits", [headers.EDITS, templates.EDITS])
def test_a_case_is_the_same_again_by_seed_and_number(tmp_path: Path, edits: dict[str, Edit]) -> None:
    def made(folder: Path, numbers: range) -> dict[Path, bytes]:
        write_cases(folder, 7, numbers, edits)
        return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    whole = made(tmp_path / "whole", range(4))
    later = made(tmp_path / "later", range(2, 4))
    assert {file: whole[file] for file in later} == later and len({file.parent for file in later}) == 2


def test_bodies_of_many_values_are_json_that_the_api_takes_and_the_same_again() -> None:
    for number in range(40):
        path, what, data = values.case(3, number, 100_000)
        assert values.case(3, number, 100_000) == (path, what, data) and f"3/{number}" in what
        assert len(data) <= 100_000
        if " deep " not in what:
            json.loads(data)


def test_bodies_of_long_texts_are_json_of_the_size_that_was_asked_for_and_the_same_again() -> None:
    for number in range(60):
        path, what, data = large.case(3, number, 10_000)
        assert large.case(3, number, 10_000) == (path, what, data) and f"3/{number}" in what
        assert json.loads(data) and 9_000 < len(data) < 11_000


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
