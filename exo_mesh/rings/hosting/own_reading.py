"""The figures about itself that this node sends its peers with every probe."""

from __future__ import annotations

import os
from collections import Counter

from exo_mesh.domain.device import MAX_HOPS, EntryRequests, HopReading, Telemetry
from exo_mesh.domain.health import Reason
from exo_mesh.machine.wiring import MachineParts
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.stage_host import StageHost

MAX_OWN_HOPS = 8
"""Hops in a reading, in a mesh of more than MAX_HOPS others."""


def own_reading(
    membership: Membership,
    host: StageHost,
    machine: MachineParts,
    *,
    sequence: int,
    reasons: tuple[Reason, ...],
    keys_digest: int,
    fetch_room_bytes: int,
    headroom_bytes: int,
    entry_requests: EntryRequests | None,
) -> Telemetry:
    """The current reading of this node. Reads nothing that blocks, because each probe makes one."""
    hardware = machine.meter.last
    drivers = {stage.instance_id: stage.beat for stage in host.beats() if stage.is_driver}
    return Telemetry(
        membership.own.id,
        sequence,
        host.usable_bytes(),
        machine.memory().total_bytes,
        host.memory.reserved_bytes,
        os.getloadavg()[0],
        host.s_per_gb,
        {name: beat.tokens for name, beat in drivers.items()},
        {name: beat.queued + beat.running for name, beat in drivers.items()},
        reasons,
        keys_digest,
        fetch_room_bytes,
        host.memory.capacity_bytes(),
        headroom_bytes,
        temperature_c=hardware.machine.temperature_c or 0.0,
        power_w=hardware.machine.power_w or 0.0,
        frames={name: beat.prefill_frames + beat.decode_frames for name, beat in drivers.items()},
        is_draining=host.draining,
        hops=own_hops(membership, host),
        hardware=hardware,
        prompt_tokens={name: beat.prefill_tokens for name, beat in drivers.items()},
        entry_requests=entry_requests,
        waiting={name: beat.queued for name, beat in drivers.items()},
        slots={name: beat.slots for name, beat in drivers.items() if beat.slots},
    )


def own_prefixes(membership: Membership, host: StageHost) -> dict[str, bytes]:
    """What the drivers here keep in their prefix caches, by instance; only of models with several instances, because
    with one there is nothing to choose."""
    models = Counter(instance.plan.model for _, instance in membership.view.instances())
    found = {stage.instance_id: stage.beat.prefix.digest for stage in host.beats() if stage.is_driver}
    model_of = {lease.plan.instance_id: lease.plan.model for lease in host.leases}
    return {name: digest for name, digest in found.items() if digest and models[model_of.get(name, "")] > 1}


def own_hops(membership: Membership, host: StageHost) -> tuple[HopReading, ...]:
    """The ways to all peers of a small mesh, so that each peer can show all links. In a mesh of more than MAX_HOPS
    others only the ways to peers that share a ring with this node, so that readings stay short."""
    if membership.num_peers <= MAX_HOPS:
        return tuple(map(_hop, membership.peers))
    partners = sorted({peer_id for lease in host.leases for peer_id in lease.plan.member_ids} - {membership.own.id})
    peers = [peer for peer_id in partners if (peer := membership.peer(peer_id)) is not None]
    return tuple(map(_hop, peers[:MAX_OWN_HOPS]))


def _hop(peer: Peer) -> HopReading:
    used = peer.paths.get(peer.client.address)
    if used is None or not used.works:
        return HopReading(peer.id, round(peer.rtt_ms or 0.0, 3))
    return HopReading(peer.id, round(used.rtt_ms or 0.0, 3), round(used.mb_per_s or 0.0, 3), used.kind.name.lower())
