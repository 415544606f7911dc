"""What a node finds wrong with itself and others, and what it says helps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from exo_mesh.domain.device import PeerInfo, RdmaPort, Telemetry
from exo_mesh.domain.health import HealthLevel, Reason
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.reports import HealthReport, InstanceHealth
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.machine.pressure import Floors, PressureLevel, Snapshot
from exo_mesh.mesh.membership.known_peers import KnownPeer
from exo_mesh.node.health import ALONE_S, Health
from exo_mesh.settings.config import Settings


def info(peer_id: str, version: str = "0.1.0") -> PeerInfo:
    return PeerInfo(peer_id, 1, peer_id, version, 3, "default", ())


def a_peer(peer_id: str, *, version: str = "0.1.0", offset_s: float | None = 0.0, **path: Any) -> Any:
    used = SimpleNamespace(**{"works": True, "rtt_ms": 0.5, "mb_per_s": 100.0, "address": "10.0.0.2:5000", **path})
    client = SimpleNamespace(address="10.0.0.2:5000")
    return SimpleNamespace(
        id=peer_id, info=info(peer_id, version), clock_offset_s=offset_s, client=client, paths={client.address: used}
    )


@dataclass
class World:
    """All that a node's health looks at."""

    peers: list[Any] = field(default_factory=list)
    readings: dict[str, Telemetry] = field(default_factory=dict)
    lost: list[tuple[PeerInfo, float]] = field(default_factory=list)
    asleep: list[tuple[KnownPeer, float]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    guarded: list[Reason] = field(default_factory=list)
    disk: Reason | None = None
    memory: PressureLevel = PressureLevel.OK
    leaked: int = 0
    instances: list[InstanceInfo] = field(default_factory=list)
    now: float = 0.0
    ended: dict[str, str] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    id_taken_by: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def health(self) -> Health:
        membership: Any = SimpleNamespace(
            own=info("me"), peers=self.peers, num_peers=len(self.peers), telemetry=self.readings, lost=self.lost,
            refusals=self.refusals, id_taken_by=self.id_taken_by, sleeps=SimpleNamespace(asleep=self.asleep),
            busy=lambda peer_id: self.busy.get(peer_id, 0.1),
        )  # fmt: skip
        last = Snapshot(0.0, 24 * 10**9, 300_000_000)
        floors = Floors.of(last.total_bytes)
        monitor: Any = SimpleNamespace(
            level=self.memory, last=last, floors=floors, loading_bytes=0, leaked_bytes=self.leaked
        )
        settings = Settings(**{"home": Path("/h"), "name": "me", **self.settings})
        disk: Any = SimpleNamespace(problem=lambda: self.disk)
        guard: Any = SimpleNamespace(reasons=lambda: self.guarded)
        health = Health(
            settings, membership, disk, guard, monitor, lambda: self.instances, lambda: self.now, lambda: self.ended
        )
        self.now += 1
        return health

    def shown(self, phase: str = "ok") -> HealthReport:
        return self.health().describe(phase)


def ring(*peer_ids: str, state: InstanceState = InstanceState.READY, reason: str = "") -> InstanceInfo:
    stages = tuple(
        StagePlan(peer_id, "e", Shard("m", i, i + 1, len(peer_ids)), 1) for i, peer_id in enumerate(peer_ids)
    )
    plan = Plan("m-1", Ballot(1, "me"), "m", "d", stages, 64, PlanInputs((("me", 9),), "memory", 1))
    return InstanceInfo(plan, state, reason=reason)


def test_a_node_with_nothing_wrong_says_so() -> None:
    shown = World(peers=[a_peer("other")], instances=[ring("me", "other")]).shown()
    assert (shown.status, shown.level, shown.reasons, shown.peers) == ("ok", "ok", [], 2)
    assert [(one.id, one.level) for one in shown.peer_health] == [("me", "ok"), ("other", "ok")]
    assert shown.instance_health == [InstanceHealth("m-1", HealthLevel.OK, [])]


@pytest.mark.parametrize(
    ("world", "code", "level", "words"),
    [
        (World(memory=PressureLevel.WARN), "memory_pressure", "degraded", "300 MB of 24.00 GB memory are free"),
        (World(memory=PressureLevel.CRITICAL), "memory_pressure", "degraded", "refused or go to other peers"),
        (World(leaked=7 * 10**9), "leaked_wired", "degraded", "7.00 GB of memory are wired"),
        (World(peers=[a_peer("o", offset_s=-9.0)]), "clock_skew", "ok", "-9 s off"),
        (World(peers=[a_peer("o", offset_s=9.0)], settings={"secret": "x"}), "clock_skew", "degraded", "certificates"),
        (World(peers=[a_peer("o", version="0.2.0")]), "version_mix", "degraded", "o 0.2.0"),
        (
            World(peers=[a_peer("o", rtt_ms=85.0)], instances=[ring("me", "o")]),
            "slow_link",
            "degraded",
            "round trip of 85 ms",
        ),
        (World(peers=[a_peer("o", mb_per_s=1.2)], instances=[ring("o", "me")]), "slow_link", "degraded", "1.2 MB/s"),
        (World(refusals=["x: other namespace"]), "peer_refused", "ok", "other namespace"),
        (World(disk=Reason("disk_full", HealthLevel.DEGRADED, "full", "make room")), "disk_full", "degraded", "full"),
        (World(guarded=[Reason("quarantined", HealthLevel.DEGRADED, "q", "r")]), "quarantined", "degraded", "q"),
    ],
)
def test_each_thing_that_is_wrong_has_a_reason_and_a_remedy(world: World, code: str, level: str, words: str) -> None:
    shown = world.shown()
    (reason,) = shown.reasons
    assert (reason.code, reason.level) == (code, level) and words in reason.message and reason.remedy
    assert shown.status == ("degraded" if level == "degraded" else "ok")


@pytest.mark.parametrize(
    "world",
    [
        World(peers=[a_peer("o", rtt_ms=85.0)]),
        World(peers=[a_peer("o", rtt_ms=85.0)], instances=[ring("me")]),
        World(peers=[a_peer("o", rtt_ms=None, mb_per_s=None)], instances=[ring("me", "o")]),
        World(peers=[a_peer("o", offset_s=None)]),
        World(peers=[a_peer("o", rtt_ms=85.0, address="127.0.0.1:5001")], instances=[ring("me", "o")]),
        World(peers=[a_peer("o", rtt_ms=85.0)], instances=[ring("me", "o")], busy={"me": 9.0}),
        World(peers=[a_peer("o", mb_per_s=1.0)], instances=[ring("me", "o")], busy={"o": 9.0}),
    ],
)
def test_what_costs_nobody_anything_is_not_said(world: World) -> None:
    """A slow way that no ring goes over, or that stays in this machine; an answer that waited for a busy processor."""
    assert world.shown().reasons == []


@pytest.mark.parametrize(
    ("offsets", "words", "level"),
    [
        ({"a": 3600.0, "b": 0.0}, "the clock of a is +3600 s off from this node's", "ok"),
        ({"a": -60.0, "b": 0.1, "c": 0.2}, "the clock of a is -60 s off from this node's", "ok"),
        ({"a": 3600.0, "b": 3599.0}, "this node's clock is -3600 s off from a, -3599 s off from b", "degraded"),
        ({"a": 9.0}, "the clock of a is +9 s off from this node's", "degraded"),
    ],
)
def test_a_wrong_clock_is_named_with_its_own_offset(offsets: dict[str, float], words: str, level: str) -> None:
    """In a mesh of three it is known whose clock is wrong; of two it is not."""
    peers = [a_peer(name, offset_s=offset_s) for name, offset_s in offsets.items()]
    (reason,) = World(peers=peers, settings={"secret": "x"}).shown().reasons
    assert words in reason.message and (reason.code, reason.level) == ("clock_skew", level)


def test_a_copied_home_is_said_with_what_to_do() -> None:
    shown = World(id_taken_by="n2").shown()
    (reason,) = [one for one in shown.reasons if one.code == "id_in_use"]
    assert shown.status == "degraded" and "in use by n2" in reason.message and "--home" in reason.remedy


def test_to_be_alone_is_only_wrong_if_peers_were_named() -> None:
    for settings, code, status in (
        ({}, "alone", "ok"),
        ({"bootstrap_peers": ("10.0.0.9:5000",)}, "no_peers", "degraded"),
    ):
        world = World(settings=settings)
        health = world.health()
        assert health.describe("ok").reasons == []
        world.now += ALONE_S
        shown = health.describe("ok")
        assert ([reason.code for reason in shown.reasons], shown.status) == ([code], status)
    world = World(settings={"discovery": ()})
    health = world.health()
    world.now += ALONE_S
    assert health.describe("ok").reasons == [], "it was told to be alone"


def test_what_peers_say_of_themselves_is_passed_on_and_so_is_who_is_gone() -> None:
    full = Reason("memory_pressure", HealthLevel.DEGRADED, "90 % are in use", "end other programs")
    world = World(
        peers=[a_peer("o")],
        readings={"o": Telemetry("o", 1, 0, 0, 0, reasons=(full,))},
        lost=[(info("gone"), 34.0)],
        instances=[ring("me", "o"), ring("me", state=InstanceState.FAILED, reason="stage 0: boom")],
    )
    shown = world.shown()
    assert shown.status == "ok", "nothing is wrong with this one"
    assert [(one.name, one.level) for one in shown.peer_health] == [
        ("me", "ok"), ("o", "degraded"), ("gone", "failed"),
    ]  # fmt: skip
    assert "34 s" in shown.peer_health[2].reasons[0].message
    first, second = shown.instance_health
    assert first.level == "degraded" and "stage 1 is on a peer where 90 %" in first.reasons[0].message
    assert second.level == "failed" and second.reasons[0].message == "stage 0: boom"


def test_a_node_that_waits_or_stops_says_what_for() -> None:
    shown = World(settings={"wait_for_peers": 2}).shown("waiting_for_peers")
    assert shown.status == "waiting_for_peers" and shown.reasons[0].message == "0 of 2 other peers seen"
    assert World(memory=PressureLevel.CRITICAL).shown("draining").status == "draining"


def test_a_node_that_waited_for_peers_in_vain_is_ready_and_says_who_is_missing_until_they_come() -> None:
    world = World(peers=[a_peer("o")], settings={"wait_for_peers": 2, "discovery_timeout": 30})
    health = world.health()
    health.missed_peers(1)
    shown = health.describe("ok")
    assert (shown.status, shown.reasons[0].code) == ("degraded", "peers_missing")
    assert shown.reasons[0].message.startswith("1 of 2 other peers were found within 30 s")


def test_a_long_lived_task_that_ended_is_named() -> None:
    shown = World(peers=[a_peer("other")], ended={"housekeeping": "KeyError"}).shown()
    assert (shown.status, shown.reasons[0].code) == ("degraded", "task_ended")
    assert '"housekeeping"' in shown.reasons[0].message and "KeyError" in shown.reasons[0].message


def test_a_peer_whose_machine_sleeps_is_asleep_and_can_be_woken() -> None:
    world = World(asleep=[(KnownPeer("p9", "studio-2", asleep_at=1.0), 7200.0)])
    shown = world.health().describe("ok").peer_health[-1]
    assert (shown.name, shown.level) == ("studio-2", "ok")
    assert [(one.code, one.message) for one in shown.reasons] == [("asleep", "the machine went to sleep 2.0 h ago")]
    assert "exo-mesh wake studio-2" in shown.reasons[0].remedy


def test_macs_that_are_bridged_in_a_loop_are_named_and_a_line_of_them_is_well() -> None:
    def mac(name: str, *others: str) -> Any:
        ports = tuple(RdmaPort(f"rdma_{o}", True, name + o, o + name, bridged=True) for o in others)
        peer = a_peer(name)
        return SimpleNamespace(**{**vars(peer), "info": replace(peer.info, rdma_ports=ports)})

    loop = World(peers=[mac("a", "b", "c"), mac("b", "a", "c"), mac("c", "a", "b")]).shown()
    (reason,) = [reason for reason in loop.reasons if reason.code == "thunderbolt_bridge_cycle"]
    assert reason.level == "degraded" and "a, b, c in a loop" in reason.message and reason.remedy
    line = World(peers=[mac("a", "b"), mac("b", "a", "c"), mac("c", "b")]).shown()
    assert not [reason for reason in line.reasons if reason.code == "thunderbolt_bridge_cycle"]


def test_an_instance_says_which_of_its_peers_have_not_checked_their_weights() -> None:
    peers = [a_peer(name) for name in ("a", "b", "c")]
    for peer in peers[:2]:
        peer.info = replace(peer.info, unverified=("m", "other") if peer.id == "a" else ("other",))
    peers[2].info = replace(peers[2].info, unverified=("m",))
    shown = World(peers=peers, instances=[ring("a", "b")]).health().describe("ok")
    (reason,) = shown.instance_health[0].reasons
    assert (reason.code, reason.level, shown.status) == ("unverified", "ok", "ok")
    assert reason.message.startswith("the weights at a are not compared"), "c has no stage of it"
