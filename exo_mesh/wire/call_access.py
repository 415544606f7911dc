"""Who may make which gRPC call: one table of all calls, and the check of a caller in an open mesh.

In a closed mesh every caller has proved that it knows the secret, so every peer may make every call. In an open mesh
anybody can send any call and join as a peer, so the right to make a call never follows from what the caller says of
itself. Some calls are then refused; others need a caller that is a live peer and confirms the call over the connection
that this node opened to it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.errors import MeshError, PeerVersionError

PROOF_KEY = "exo-mesh-proof"
"""Metadata of a call that needs a peer in an open mesh: `ID:PROOF`, the caller's peer id and a number for one use."""

CONFIRM_S = 1.0
"""Deadline for a peer's answer whether it makes a call."""

PROOF_S = 30.0
"""How long a proof can be confirmed: longer than any deadline of the calls that need one."""

MAX_PROOFS = 1024
MAX_CHARS = 64
"""Longest proof that a peer is asked for."""

MAX_ASKED = 8
"""Most peers of an older version at one address that are asked whether they know `Confirm`."""


class Access(Enum):
    """Who may make a call in an open mesh."""

    ANYBODY = "anybody"
    PEER = "a live peer that confirms the call"
    OWNER = "only with --open-admin"
    SECRET = "nobody: only a mesh with a secret has this call"


@dataclass(frozen=True, slots=True)
class Rule:
    """The access to one call. instead: what a person types on the machine of the node that refused the call"""

    access: Access
    instead: str = ""


_ANYBODY, _PEER = Rule(Access.ANYBODY), Rule(Access.PEER)

CALLS: Mapping[str, Rule] = {
    # Membership: messages that introduce their sender, and carry news.
    "Control/Hello": _ANYBODY,
    "Control/Probe": _ANYBODY,
    "Control/IndirectProbe": _ANYBODY,
    "Control/Exchange": _ANYBODY,
    "Control/Goodbye": _ANYBODY,
    "Control/Confirm": _ANYBODY,
    "Paths/ProbePath": _ANYBODY,
    # What anybody may read over the API of an open mesh too.
    "Control/DescribeModel": _ANYBODY,
    "Control/DescribeFiles": _ANYBODY,
    "Control/ReadTextFiles": _ANYBODY,
    "Control/Diagnose": _ANYBODY,
    "Control/LookAtStage": _ANYBODY,
    # Placement: a peer places models over machines whose API it does not call.
    "Control/SelfTest": _ANYBODY,
    "Control/Reserve": _ANYBODY,
    "Control/Commit": _ANYBODY,
    "Control/Link": _ANYBODY,
    "Control/Introduce": _ANYBODY,  # in an open mesh from peers only, never from the hub: see ModelService
    "Control/Pull": _ANYBODY,  # the same
    # The data plane: a ring's frames, and the requests to its driver.
    "Ring/Frames": _ANYBODY,
    "Driver/Generate": _ANYBODY,
    "Driver/Recall": _ANYBODY,
    "Driver/PutImage": _ANYBODY,
    # What ends or reads the work of others.
    "Control/Release": _PEER,
    "Control/DeleteInstance": _PEER,
    "Control/KeepInstance": _PEER,
    "Control/Cancel": _PEER,
    "Control/FindStreams": _PEER,
    "Control/FollowStream": _PEER,
    "Control/ReadKept": _PEER,
    "Control/DeleteKept": _PEER,
    # What only the owner of a machine decides.
    "Control/StopNode": Rule(Access.OWNER, "exo-mesh node stop` or `exo-mesh node restart"),
    "Control/Drain": Rule(Access.OWNER, "exo-mesh drain` or `exo-mesh drain --undo"),
    "Control/Wake": Rule(Access.OWNER, "exo-mesh wake PEER"),
    "Control/ReadLog": Rule(
        Access.OWNER, 'curl -H "Authorization: Bearer $(exo-mesh key local)" http://127.0.0.1:52415/admin/log'
    ),
    "Control/ReadTraces": Rule(Access.OWNER, "curl http://127.0.0.1:52415/v1/traces"),
    "Control/DeleteTraces": Rule(
        Access.OWNER,
        'curl -X POST -H "Authorization: Bearer $(exo-mesh key local)" http://127.0.0.1:52415/v1/traces/delete',
    ),
    "Control/Capture": Rule(
        Access.OWNER,
        'curl -X POST -H "Authorization: Bearer $(exo-mesh key local)" http://127.0.0.1:52415/v1/diagnostics/node/capture',
    ),
    "Control/DropModel": Rule(Access.OWNER, "exo-mesh rm MODEL"),
    "Control/DeleteCard": Rule(Access.OWNER, "exo-mesh models delete MODEL"),
    "Control/ShareKeys": Rule(Access.SECRET),
}
"""All calls of all services, as SERVICE/CALL."""


def rule_of(path: str) -> Rule:
    """The rule of a call by its gRPC path, such as `/exo_mesh.Control/Drain`. KeyError for an unknown call."""
    return CALLS[path.removeprefix("/exo_mesh.")]


class OwnCalls:
    """The proofs of the calls that this node makes, until the callee has asked for them. own_id: of this node."""

    def __init__(self, own_id: str, now: Clock = monotonic) -> None:
        self._own_id = own_id
        self._now = now
        self._made: OrderedDict[str, float] = OrderedDict()

    def metadata(self) -> tuple[str, str]:
        """The metadata of one call."""
        proof, now = secrets.token_hex(16), self._now()
        while self._made and (len(self._made) >= MAX_PROOFS or next(iter(self._made.values())) < now - PROOF_S):
            self._made.popitem(last=False)
        self._made[proof] = now
        return PROOF_KEY, f"{self._own_id}:{proof}"

    def confirm(self, proof: str) -> bool:
        """Whether this node makes a call with this proof. True once for each proof, so that nobody repeats a call."""
        made = self._made.pop(proof, None)
        return made is not None and self._now() - made <= PROOF_S


class Confirming(Protocol):
    """A connection to a peer that this node has opened."""

    async def confirm(self, proof: str, timeout_s: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class PeerAt:
    """A live peer. hosts: the addresses, without ports, at which this node reaches it."""

    id: str
    hosts: Set[str]
    client: Confirming


class CallGuard:
    """Decides whether a caller may make a call. is_closed: the mesh has a secret. open_admin: the setting of that name.

    peers: the live peers.
    """

    def __init__(
        self, *, is_closed: bool = True, open_admin: bool = False, peers: Callable[[], Sequence[PeerAt]] = tuple
    ) -> None:
        self._is_closed = is_closed
        self._open_admin = open_admin
        self._peers = peers

    async def refusal(self, path: str, caller_host: str, proof: str) -> str:
        """The reason why a call is refused; "" if it is not. proof: the value of the metadata PROOF_KEY."""
        if self._is_closed:
            return ""
        rule, call = rule_of(path), path.rpartition("/")[2]
        if rule.access is Access.SECRET:
            return f"{call} works only in a mesh with a secret, and this mesh is open"
        if self._open_admin or rule.access is Access.ANYBODY:
            return ""
        if rule.access is Access.OWNER:
            return (
                f"this mesh is open, so a node obeys {call} only from its own machine; type `{rule.instead}` on that "
                "machine, or start its node with --open-admin, or close the mesh with a secret"
            )
        if await self._is_from_peer(caller_host, proof):
            return ""
        return f"this mesh is open, so a node obeys {call} only from a live peer, and no peer confirms this call"

    async def _is_from_peer(self, caller_host: str, proof: str) -> bool:
        peers = self._peers()
        peer_id, _, number = proof.partition(":")
        if 0 < len(number) <= MAX_CHARS:
            claimed = next((peer for peer in peers if peer.id == peer_id), None)
            return claimed is not None and await _confirms(claimed, number)
        host = caller_host.partition("%")[0].removeprefix("::ffff:")
        near = [peer for peer in peers if host in peer.hosts][:MAX_ASKED]
        return any(await asyncio.gather(*(_is_older(peer) for peer in near)))


async def _confirms(peer: PeerAt, proof: str) -> bool:
    try:
        return await peer.client.confirm(proof, CONFIRM_S)
    except MeshError:
        return False


async def _is_older(peer: PeerAt) -> bool:
    """Whether a peer is of a version that sends no proofs. Its calls count if they come from its machine."""
    try:
        await peer.client.confirm("", CONFIRM_S)
    except PeerVersionError:
        return True
    except MeshError:
        return False
    return False
