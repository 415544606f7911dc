"""Who may make a call in an open mesh: the rules that the rows of calls have, and the check of a caller.

In a closed mesh every caller has proved that it knows the secret, so every peer may make every call. In an open mesh
anybody can send any call and join as a peer, so the right to make a call never follows from what the caller says of
itself. Some calls are then refused; others need a caller that is a live peer and confirms the call over the connection
that this node opened to it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence, Set
from enum import Enum
from urllib.parse import unquote

import msgspec

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


class Rule(msgspec.Struct, frozen=True):
    """The access to one call. instead: what a person types on the machine of the node that refused the call"""

    access: Access
    instead: str = ""


ANYBODY, PEER, SECRET = Rule(Access.ANYBODY), Rule(Access.PEER), Rule(Access.SECRET)


def owner(instead: str) -> Rule:
    """Only the owner of the machine makes the call; see Rule."""
    return Rule(Access.OWNER, instead)


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


class PeerAt(msgspec.Struct, frozen=True):
    """A live peer. hosts: the addresses, without ports, at which this node reaches it. confirm: asks the peer, over the
    connection that this node has opened, whether it makes the call with a proof."""

    id: str
    hosts: Set[str]
    confirm: Callable[[str], Awaitable[bool]]


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

    @property
    def obeys_all(self) -> bool:
        """Whether no call is refused, because every caller has proved that it knows the secret."""
        return self._is_closed

    async def refusal(self, call: str, rule: Rule, caller_host: str, proof: str) -> str:
        """The reason why a call is refused; "" if it is not. proof: the value of the metadata PROOF_KEY."""
        if self._is_closed:
            return ""
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
        return await peer.confirm(proof)
    except MeshError:
        return False


async def _is_older(peer: PeerAt) -> bool:
    """Whether a peer is of a version that sends no proofs. Its calls count if they come from its machine."""
    try:
        await peer.confirm("")
    except PeerVersionError:
        return True
    except MeshError:
        return False
    return False


def host_of_peer(peer: str) -> str:
    """The address in gRPC's name for the peer of a call: `ipv4:10.0.0.2:41234`, `ipv6:%5B::1%5D:41234`, or
    `ipv6:%5Bfe80::1%252%5D:41234` for a link-local address with its interface."""
    kind, _, rest = peer.partition(":")
    host = unquote(rest.rpartition(":")[0]).strip("[]")
    return host if kind in ("ipv4", "ipv6") else ""
