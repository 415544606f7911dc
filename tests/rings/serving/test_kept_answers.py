"""Kept answers: bounded, dropped in time, read by those who may, and found at the peer that their ids name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exo_mesh.errors import InputError, TransportError, UnknownAnswerError
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.rings.serving import calls
from exo_mesh.rings.serving.calls import MAX_CHAIN_BYTES, PART_BYTES
from exo_mesh.rings.serving.kept_answers import KeptAnswer, KeptAnswers, owner_of
from exo_mesh.rings.serving.kept_service import KeptService
from exo_mesh.wire.peer_call import AnyRow
from exo_mesh.wire.proto import control_pb2 as pb
from tests.support.neighbours import Neighbours

HASH = "0123456789abcdef01234567"


@dataclass
class TestClock:
    __test__ = False
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def answer(name: str, *, key_id: str = "", previous: str = "", data: bytes = b"x") -> KeptAnswer:
    return KeptAnswer(name, key_id, previous, data)


def ids(found: Any) -> list[str]:
    return [one.id for one in found]


def test_a_flood_of_answers_keeps_only_the_newest() -> None:
    kept = KeptAnswers(60, TestClock(), max_answers=10)
    for number in range(100):
        kept.keep(answer(f"a{number}"))
    assert len(kept) == 10 and kept.num_bytes == 10 * answer("").num_bytes
    assert kept.read("", "a89") is None and kept.read("", "a90") is not None


def test_large_answers_leave_room_for_few() -> None:
    kept = KeptAnswers(60, TestClock(), max_bytes=10_000)
    for name in "abcdef":
        kept.keep(answer(name, data=bytes(2_000)))
    assert len(kept) == 3 and kept.num_bytes <= 10_000
    kept.keep(answer("huge", data=bytes(20_000)))
    assert kept.read("", "huge") is None and len(kept) == 3
    kept.keep(answer("f"))
    assert len(kept) == 3 and kept.num_bytes < 6_000


def test_an_answer_is_dropped_some_time_after_its_last_use() -> None:
    clock = TestClock()
    kept = KeptAnswers(60, clock)
    kept.keep(answer("a"))
    kept.keep(answer("b"))
    clock.now = 50
    assert kept.read("", "a") is not None
    clock.now = 100
    assert kept.read("", "b") is None and kept.read("", "a") is not None
    clock.now = 160
    assert len(kept) == 0 and kept.num_bytes == 0


def test_the_number_of_kept_answers_is_reported() -> None:
    clock, seen = TestClock(), [(0, 0)]
    kept = KeptAnswers(60, clock, on_change=lambda *counts: seen.append(counts))
    kept.keep(answer("a"))
    kept.keep(answer("b"))
    assert seen[-1] == (2, 2 * answer("").num_bytes)
    clock.now = 61
    kept.tidy()
    assert seen[-1] == (0, 0)


def test_nothing_is_kept_when_the_time_is_zero() -> None:
    kept = KeptAnswers(0, TestClock())
    kept.keep(answer("a"))
    assert not kept.is_on and len(kept) == 0


def test_only_the_key_of_an_answer_reads_it() -> None:
    kept = KeptAnswers(60, TestClock())
    kept.keep(answer("a", key_id="1"))
    kept.keep(answer("b"))
    assert [kept.read(reader, "a") is not None for reader in ("1", "2", "", None)] == [True, False, False, True]
    assert [kept.read(reader, "b") is not None for reader in ("1", "", None)] == [False, True, True]
    assert not kept.delete("2", "a") and kept.delete("1", "a") and not kept.delete("1", "a")


def test_a_conversation_loses_its_first_answer_last() -> None:
    kept = KeptAnswers(60, TestClock(), max_answers=4)
    for name, previous in (("a", ""), ("b", "a"), ("c", "b")):
        kept.keep(answer(name, previous=previous))
    assert ids(kept.chain("", "c")) == ["c", "b", "a"]
    for name in ("x", "y"):
        kept.keep(answer(name))
    assert ids(kept.chain("", "b")) == ["b", "a"] and kept.read("", "c") is None


def test_an_id_names_its_owner_or_nobody() -> None:
    assert owner_of(f"resp_1a2b3c4d_{HASH}") == owner_of(f"resp_1a2b3c4d_{HASH}_99") == "1a2b3c4d"
    assert owner_of(f"resp_{HASH}") == owner_of(f"resp_{HASH}_99") == ""


@dataclass
class Wire:
    """A peer's client that calls another node in this process."""

    answers: dict[AnyRow, Any]
    calls: list[str] = field(default_factory=list)
    broken: TransportError | None = None

    async def stream(self, row: AnyRow, request: Any, *, quiet: bool = False) -> AsyncGenerator[Any, None]:
        self.calls.append(request.id)
        if self.broken:
            raise self.broken
        async for part in self.answers[row].function(request):
            yield pb.KeptPart.FromString(part.SerializeToString())

    async def call(self, row: AnyRow, request: Any, timeout_s: float | None = None) -> Any:
        return await self.answers[row].function(request, "")


@dataclass
class Nodes:
    """Nodes n0…, n1…, which all know each other."""

    desks: list[KeptService] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, count: int) -> Nodes:
        made = cls()
        for own in range(count):
            node_id, kept, nothing = f"n{own:07d}-long", KeptAnswers(60, TestClock()), cast(Any, None)
            answers = calls.answers(node_id, nothing, nothing, kept)
            mesh: Any = Neighbours(node_id, answers, lambda own=own: made.peers(own))  # type: ignore[misc]
            made.desks.append(KeptService(mesh, kept))
            made.wires.append(Wire({answer.row: answer for answer in answers}))
        return made

    def peers(self, own: int) -> list[Peer]:
        found = [
            SimpleNamespace(id=f"n{other:07d}-long", client=wire, info=SimpleNamespace(name=f"n{other}"))
            for other, wire in enumerate(self.wires)
            if other != own and other not in self.gone
        ]
        return cast(list[Peer], found)

    def name(self, own: int, number: int = 0) -> str:
        return f"resp_{self.desks[own].owner}_{number:024d}"


async def test_another_peer_reads_an_answer_from_its_owner_and_keeps_nothing() -> None:
    nodes = Nodes.of(3)
    data = bytes(range(256)) * (PART_BYTES // 200)
    nodes.desks[0].keep(answer(nodes.name(0), data=data))
    found = await nodes.desks[1].read("", nodes.name(0))
    assert found is not None and found.data == data
    assert nodes.wires[2].calls == [], "only the owner is asked"
    assert nodes.desks[1]._kept.read(None, nodes.name(0)) is None
    assert await nodes.desks[1].read("7", nodes.name(0)) is None, "another key"
    assert await nodes.desks[2].delete("", nodes.name(0)) and not await nodes.desks[2].delete("", nodes.name(0))


async def test_a_conversation_over_several_owners_is_put_together() -> None:
    nodes = Nodes.of(3)
    names = [nodes.name(owner, number) for number, owner in enumerate((0, 0, 1, 0, 2))]
    for number, owner in enumerate((0, 0, 1, 0, 2)):
        nodes.desks[owner].keep(answer(names[number], previous=names[number - 1] if number else ""))
    for desk in nodes.desks:
        assert ids(await desk.chain("", names[-1])) == names[::-1]
    nodes.gone.add(1)
    with pytest.raises(UnknownAnswerError, match=r"n0000001.* is not in the mesh") as caught:
        await nodes.desks[0].chain("", names[-1])
    assert caught.value.param == "previous_response_id"


async def test_an_answer_without_an_owner_in_its_id_is_found_anywhere() -> None:
    nodes = Nodes.of(3)
    nodes.desks[2].keep(answer(f"resp_{HASH}"))
    assert await nodes.desks[0].read("", f"resp_{HASH}") is not None
    nodes.wires[1].broken = TransportError("no way")
    assert await nodes.desks[0].read("", f"resp_{HASH}") is not None


async def test_a_peer_that_is_silent_holds_up_nobody() -> None:
    nodes = Nodes.of(3)
    never = asyncio.Event()

    async def silent(row: AnyRow, request: Any, *, quiet: bool = False) -> AsyncGenerator[pb.KeptPart, None]:
        await never.wait()
        yield pb.KeptPart()

    nodes.desks[2].keep(answer(f"resp_{HASH}"))
    nodes.wires[1].stream = silent  # type: ignore[method-assign]
    assert await asyncio.wait_for(nodes.desks[0].read("", f"resp_{HASH}"), 5) is not None


async def test_an_owner_that_does_not_answer_is_an_error_and_not_an_absence() -> None:
    nodes = Nodes.of(2)
    nodes.wires[0].broken = TransportError("no way")
    with pytest.raises(TransportError):
        await nodes.desks[1].read("", nodes.name(0))


async def test_a_peer_that_sends_a_ring_of_answers_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.rings.serving.kept_service.MAX_LINKS", 20)
    nodes = Nodes.of(2)
    nodes.desks[0].keep(answer(nodes.name(0), previous=nodes.name(1)))
    nodes.desks[1].keep(answer(nodes.name(1), previous=nodes.name(0)))
    with pytest.raises(InputError, match="too long"):
        await nodes.desks[0].chain("", nodes.name(0))


async def test_a_peer_that_sends_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes.of(2)

    async def endless(row: AnyRow, request: Any, *, quiet: bool = False) -> AsyncGenerator[pb.KeptPart, None]:
        part = pb.KeptPart(id=request.id, data=bytes(PART_BYTES))
        while True:
            yield part

    monkeypatch.setattr(nodes.wires[0], "stream", endless)
    with pytest.raises(TransportError, match="more than"):
        await nodes.desks[1].read("", nodes.name(0))
    assert MAX_CHAIN_BYTES > PART_BYTES
