"""Who may make which call at the control port: strangers, forged ids, peers, and peers of the version before."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from exo_mesh.domain.plan import Ballot
from exo_mesh.errors import OpenMeshError
from exo_mesh.mesh.membership.calls import CONFIRM, EXCHANGE, STOP_NODE, confirm, fence_to_proto
from exo_mesh.mesh.membership.fences import Fence
from exo_mesh.rings.placing.calls import KEEP_INSTANCE
from exo_mesh.rings.serving.calls import CANCEL
from exo_mesh.wire.call_access import (
    MAX_PROOFS,
    PROOF_KEY,
    PROOF_S,
    Access,
    CallGuard,
    OwnCalls,
    PeerAt,
)
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.control_server import ControlServer
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto import driver_pb2, paths_pb2, ring_pb2
from tests.mesh.membership import meshes
from tests.mesh.membership.meshes import Peer, peer_info
from tests.support.call_rows import all_rows
from tests.support.installs import ROOT
from tests.support.nodes import until
from tests.wire.test_gate import Recorder

EVERY_CALL = sorted(
    [
        f"{service.name}/{method.name}"
        for file in (pb, driver_pb2, paths_pb2, ring_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
)
RULES = {row.path.removeprefix("/exo_mesh."): row.access for row in all_rows()}
OF_NODES = [call for call in EVERY_CALL if call.startswith("Control/")]
OWNERS = {"StopNode", "Drain", "Capture", "ReadLog", "ReadTraces", "DeleteTraces", "DropModel", "DeleteCard", "Wake"}
PEERS = {"DeleteInstance", "KeepInstance", "Cancel", "Release", "FindStreams", "FollowStream", "ReadKept", "DeleteKept"}
OK, DENIED = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED


@asynccontextmanager
async def port(guard: CallGuard) -> AsyncIterator[tuple[Any, str]]:
    """A control port that notes the calls that get through."""
    handler: Any = Recorder()
    server = ControlServer(handler.answers, guard=guard)
    yield handler, f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.stop(0)


async def ask(address: str, call: str, proof: str = "") -> tuple[grpc.StatusCode, str]:
    """The status of a call with an empty message."""
    metadata = ((PROOF_KEY, proof),) if proof else ()
    async with grpc.aio.insecure_channel(address) as channel:
        method: Any = channel.unary_stream(f"/exo_mesh.{call}")
        made = method(b"", metadata=metadata, timeout=10)
        try:
            async for _ in made:
                pass
        except grpc.aio.AioRpcError as exc:
            return exc.code(), exc.details() or ""
    return OK, ""


def test_every_call_of_every_service_says_who_may_make_it() -> None:
    assert sorted(RULES) == EVERY_CALL, "a new call needs a row in the calls.py of its package"
    of_owners = {call.partition("/")[2] for call, rule in RULES.items() if rule.access is Access.OWNER}
    of_peers = {call.partition("/")[2] for call, rule in RULES.items() if rule.access is Access.PEER}
    assert (of_owners, of_peers) == (OWNERS, PEERS)
    assert all(bool(rule.instead) is (rule.access is Access.OWNER) for rule in RULES.values())


async def test_a_stranger_of_an_open_mesh_is_refused_before_its_message_is_read() -> None:
    async with port(CallGuard(is_closed=False)) as (handler, address):
        for call in OF_NODES:
            name = call.partition("/")[2]
            code, text = await ask(address, call)
            assert (code is DENIED) is (name in OWNERS | PEERS | {"ShareKeys"}), call
            if name in OWNERS:
                assert "this mesh is open" in text and f"type `{RULES[call].instead}` on that machine" in text
        seen = {type(message).__name__ for message in handler.seen}
        assert not seen & {f"{name}Request" for name in OWNERS | PEERS | {"ShareKeys"}}


@pytest.mark.parametrize("guard", [CallGuard(), CallGuard(is_closed=False, open_admin=True)])
async def test_a_closed_mesh_and_open_admin_obey_every_caller_that_gets_through(guard: CallGuard) -> None:
    async with port(guard) as (_, address):
        refused = [call for call in OF_NODES if (await ask(address, call))[0] is DENIED]
    assert refused == ([] if guard._is_closed else ["Control/ShareKeys"])


def live_peers(one: Peer) -> list[PeerAt]:
    calls = one.membership.calls
    return [PeerAt(peer.id, peer.proven_ips, partial(confirm, calls, peer.id)) for peer in one.membership.peers]


@asynccontextmanager
async def two_peers() -> AsyncIterator[tuple[Any, str, Peer, Peer]]:
    """A guarded port of node a, beside its membership, in which b is a live peer; and both peers."""
    a, b = Peer(peer_info("a" * 32)), Peer(peer_info("b" * 32))
    for peer in (a, b):
        await peer.start()
    b.membership.suggest(a.address)
    await until(lambda: a.sees == ["b" * 32] and b.sees == ["a" * 32])
    known = [
        PeerAt(peer.id, peer.proven_ips, partial(confirm, a.membership.calls, peer.id)) for peer in a.membership.peers
    ]
    try:
        async with port(CallGuard(is_closed=False, peers=lambda: known)) as (handler, address):
            yield handler, address, a, b
    finally:
        await a.stop()
        await b.stop()


async def test_a_live_peer_ends_what_another_owns_and_nobody_else_in_its_name() -> None:
    async with two_peers() as (handler, address, _, b):
        client = ControlClient(address, own_calls=b.own_calls)
        await client.call(CANCEL, pb.CancelRequest(request_id="x"))
        await client.call(KEEP_INSTANCE, pb.KeepInstanceRequest(instance_id="m-1", idle_s=5.0))
        await client.close()
        assert [type(one).__name__ for one in handler.seen] == ["CancelRequest", "KeepInstanceRequest"]
        for own_calls in (OwnCalls("b" * 32), OwnCalls("c" * 32), OwnCalls("a" * 32), None):
            stranger = ControlClient(address, own_calls=own_calls)
            with pytest.raises(OpenMeshError, match="only from a live peer"):
                await stranger.call(CANCEL, pb.CancelRequest(request_id="x"))
            await stranger.close()
        _, proof = b.own_calls.metadata()
        assert [(await ask(address, "Control/Cancel", proof))[0] for _ in range(2)] == [OK, DENIED], "once"
        for nonsense in ("b" * 32, f"{'b' * 32}:", ":", f"{'b' * 32}:{'0' * 4000}"):
            assert (await ask(address, "Control/Cancel", nonsense))[0] is DENIED
        owner = ControlClient(address, own_calls=b.own_calls)
        with pytest.raises(OpenMeshError, match="exo-mesh node stop"):
            await owner.call(STOP_NODE, pb.StopNodeRequest(node_id="a" * 32))
        await owner.close()


async def test_a_peer_of_the_version_before_counts_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    older = meshes.Peer.answers
    monkeypatch.setattr(meshes.Peer, "answers", lambda peer: [one for one in older(peer) if one.row is not CONFIRM])
    async with two_peers() as (_, address, a, _):
        assert (await ask(address, "Control/Cancel"))[0] is OK
        assert (await ask(address, "Control/StopNode"))[0] is DENIED
        known = [
            PeerAt(peer.id, {"10.9.8.7"}, partial(confirm, a.membership.calls, peer.id)) for peer in a.membership.peers
        ]
        async with port(CallGuard(is_closed=False, peers=lambda: known)) as (_, elsewhere):
            assert (await ask(elsewhere, "Control/Cancel"))[0] is DENIED


async def test_a_deletion_in_the_name_of_a_peer_counts_only_if_that_peer_has_it() -> None:
    async with two_peers() as (_, _, a, b):
        forged = Fence("m-1", Ballot(9, "c"), 60.0)
        real = Fence("m-2", Ballot(9, "b"), 60.0)
        b.membership.take_fence(real)
        request = pb.ExchangeRequest(
            from_peer="b" * 32, incarnation=1, fences=[fence_to_proto(forged), fence_to_proto(real)]
        )
        stranger = ControlClient(a.address)
        await stranger.call(EXCHANGE, request)
        await stranger.close()
        await until(lambda: a.membership.fences.covers("m-2", Ballot(9, "b")))
        assert not a.membership.fences.covers("m-1", Ballot(1, "b"))


def test_proofs_are_bounded_and_expire() -> None:
    now = [0.0]
    calls = OwnCalls("a", lambda: now[0])
    proofs = [calls.metadata()[1].partition(":")[2] for _ in range(MAX_PROOFS + 5)]
    assert not calls.confirm(proofs[0]) and calls.confirm(proofs[-1]) and not calls.confirm(proofs[-1])
    assert not calls.confirm("") and len(calls._made) < MAX_PROOFS
    now[0] += PROOF_S + 1
    assert not calls.confirm(proofs[-2])
    calls.metadata()
    assert len(calls._made) == 1


def test_the_documentation_says_of_every_call_who_may_make_it() -> None:
    page = (ROOT / "docs" / "tasks" / "security.md").read_text()
    table = page.partition("### An open mesh and its peers")[2].partition("\n\n### ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ") and "`" in line]
    said = {name: open_mesh.strip() for calls, _, open_mesh, _ in rows for name in re.findall(r"`(\w+)`", calls)}
    beginnings = {
        Access.ANYBODY: "anybody",
        Access.PEER: "a live peer",
        Access.OWNER: "nobody",
        Access.SECRET: "nobody",
    }
    assert said.keys() == {call.partition("/")[2] for call in RULES} | {"Frames"}
    for call, rule in RULES.items():
        assert said[call.partition("/")[2]].startswith(beginnings[rule.access]), call
