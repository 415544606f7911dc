"""The records of the mesh as one peer may accept and write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.view import InstanceInfo, Record, RecordKey, View
from exo_mesh.errors import TransportError
from exo_mesh.membership.peers import VERSIONS_PER_INCARNATION
from exo_mesh.proto import control_pb2 as pb
from exo_mesh.transport.control_codec import record_from_proto


class Records:
    """A view, the right to write under one owner's name, and the readings of all peers.

    Only records of living owners, in their present incarnation, are taken over: so nobody brings back the dead.
    """

    def __init__(self, own_id: str, own_incarnation: int, incarnation_of: Callable[[str], int | None]) -> None:
        self.view = View()
        self.telemetry: dict[str, Telemetry] = {}
        self._own_id = own_id
        self._incarnation_of = incarnation_of
        self._version = own_incarnation * VERSIONS_PER_INCARNATION

    def write(self, kind: str, record_id: str, value: PeerInfo | InstanceInfo | None, now: float) -> None:
        """Write a record of our own; None deletes it."""
        self._version += 1
        self.view.merge([Record(RecordKey(kind, record_id, self._own_id), self._version, value)], now)

    def take(self, messages: Iterable[pb.Record], now: float) -> tuple[list[Record], list[PeerInfo]]:
        """Merge what a peer sent; answer what changed, and peers that the sender knows and we do not."""
        accepted: list[Record] = []
        strangers: list[PeerInfo] = []
        for message in messages:
            try:
                record = record_from_proto(message)
            except TransportError:  # a newer protocol may have records that this version cannot read
                continue
            owner = record.key.owner
            if owner == self._own_id:
                continue
            incarnation = self._incarnation_of(owner)
            if incarnation is None:
                if isinstance(record.value, PeerInfo) and record.value.id == owner:
                    strangers.append(record.value)
            elif record.version // VERSIONS_PER_INCARNATION == incarnation:
                accepted.append(record)
        return self.view.merge(accepted, now), strangers

    def take_telemetry(self, reading: Telemetry) -> None:
        """Keep a reading of a living peer if it is newer."""
        held = self.telemetry.get(reading.peer_id)
        alive = reading.peer_id == self._own_id or self._incarnation_of(reading.peer_id) is not None
        if alive and (held is None or held.sequence < reading.sequence):
            self.telemetry[reading.peer_id] = reading

    def forget(self, peer_id: str) -> list[Record]:
        """Drop all that a peer wrote; answer its records that were in force."""
        self.telemetry.pop(peer_id, None)
        return self.view.drop_owner(peer_id)
