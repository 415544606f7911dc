"""What peers say to each other in hello, probe and exchange, as values; control.proto explains the fields. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.fields import Flat, OnlyValid
from exo_mesh.domain.view import Record
from exo_mesh.mesh.membership.fences import Fence
from exo_mesh.mesh.membership.swim import Life, PeerId, SwimState, Update
from exo_mesh.wire.readings import Reading


class PeerUpdate(NamedTuple):
    """News of a peer. record: its peer record, if it is alive, for receivers that do not know it."""

    update: Annotated[Update, Flat()]
    record: Record | None = None


class OwnerSummary(NamedTuple):
    """Summary of all that a peer holds of one owner."""

    owner: PeerId
    state: SwimState
    life: Annotated[Life, Flat()]
    newest: int
    digest: int

    @property
    def update(self) -> Update:
        return Update(self.owner, self.state, self.life)


class PeerPrefixes(msgspec.Struct, frozen=True):
    """What the drivers of one peer keep in their prefix caches, by instance; see domain/routing/digest.py. incarnation:
    of that peer. version: counts from 1 after each restart."""

    peer_id: str
    incarnation: int
    version: int = 0
    digests: Mapping[str, bytes] = {}


Updates = Annotated[tuple[PeerUpdate, ...], OnlyValid()]
SentRecords = Annotated[tuple[Record, ...], OnlyValid()]


class HelloRequest(msgspec.Struct, frozen=True):
    peer: PeerInfo
    refutation: int = 0


class HelloReply(msgspec.Struct, frozen=True):
    """verdict: the answering peer holds the caller for dead or gone. id_in_use_by: the name of another node that has
    the caller's id."""

    peer: PeerInfo
    refutation: int = 0
    accepted: bool = False
    reason: str = ""
    verdict: PeerUpdate | None = None
    id_in_use_by: str = ""


class ProbeRequest(msgspec.Struct, frozen=True):
    from_peer: str
    incarnation: int
    target: str
    updates: Updates = ()
    records: SentRecords = ()
    telemetry: tuple[Reading, ...] = ()
    prefixes: tuple[PeerPrefixes, ...] = ()


class ProbeReply(msgspec.Struct, frozen=True):
    """view_sum, fences_sum: None from a peer of an older version."""

    peer_id: str
    incarnation: int
    unix_s: float = 0.0
    unknown_sender: bool = False
    takes_datagrams: bool = False
    keeps_hops: bool = False
    updates: Updates = ()
    records: SentRecords = ()
    telemetry: tuple[Reading, ...] = ()
    prefixes: tuple[PeerPrefixes, ...] = ()
    view_sum: int | None = None
    fences_sum: int | None = None


class ExchangeRequest(msgspec.Struct, frozen=True):
    from_peer: str
    incarnation: int
    digest: int = 0
    push: SentRecords = ()
    want: tuple[str, ...] = ()
    telemetry: tuple[Reading, ...] = ()
    updates: Updates = ()
    fences_digest: int = 0
    fences: tuple[Fence, ...] = ()


class ExchangeReply(msgspec.Struct, frozen=True):
    unknown_sender: bool = False
    summary: Annotated[tuple[OwnerSummary, ...], OnlyValid()] = ()
    newer: SentRecords = ()
    telemetry: tuple[Reading, ...] = ()
    updates: Updates = ()
    fences_digest: int = 0
    fences: tuple[Fence, ...] = ()
