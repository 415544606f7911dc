"""What an anti-entropy round sends fits into a message, however many records, updates and deletions there are."""

from __future__ import annotations

import pytest

from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.view import Record, RecordKey
from exo_mesh.mesh.membership.calls import EXCHANGE_REQUEST
from exo_mesh.mesh.membership.exchange import ROUND_BYTES, _fence_bytes, _Room, _update_bytes
from exo_mesh.mesh.membership.fences import Fence
from exo_mesh.mesh.membership.messages import ExchangeRequest, PeerUpdate
from exo_mesh.mesh.membership.swim import Life, SwimState, Update
from exo_mesh.wire.control_codec import encoded, record_bytes
from tests.mesh.membership.meshes import peer_info

LONGEST = Life(2**64 - 1, 2**64 - 1)
OVERHEAD_BYTES = 40
"""Of the other fields of a request."""


@pytest.mark.parametrize("letter", ["a", "é"])
@pytest.mark.parametrize("num_accusers", [0, 4])
def test_updates_that_fit_are_no_longer_than_a_round(letter: str, num_accusers: int) -> None:
    peer_id = 64 * letter
    record = encoded(Record(RecordKey("peer", peer_id, peer_id), 2**63, peer_info(peer_id)))
    update = Update(peer_id, SwimState.SUSPECT, LONGEST, (peer_id,) * num_accusers)
    sent = tuple(_Room().fitting([PeerUpdate(update, record), PeerUpdate(update)] * 5000, _update_bytes))
    num_bytes = EXCHANGE_REQUEST.write(ExchangeRequest("a", 1, updates=sent)).ByteSize()
    assert 0.7 * ROUND_BYTES < num_bytes <= ROUND_BYTES + OVERHEAD_BYTES


@pytest.mark.parametrize("text", ["m-1", 128 * "é"])
def test_deletions_that_fit_are_no_longer_than_a_round(text: str) -> None:
    sent = tuple(_Room().fitting([Fence(text, Ballot(2**62 - 1, 32 * "a"), 1.5)] * 9999, _fence_bytes))
    num_bytes = EXCHANGE_REQUEST.write(ExchangeRequest("a", 1, fences=sent)).ByteSize()
    assert 0.7 * ROUND_BYTES < num_bytes <= ROUND_BYTES + OVERHEAD_BYTES


def test_records_that_fit_are_no_longer_than_a_round() -> None:
    key = RecordKey("peer", "a", "a")
    live, gone = encoded(Record(key, 2**63, peer_info("a"))), Record(key, 2**63, None, 12.5)
    sent = tuple(_Room().fitting([live, gone] * 20_000, record_bytes))
    num_bytes = EXCHANGE_REQUEST.write(ExchangeRequest("a", 1, push=sent)).ByteSize()
    assert ROUND_BYTES < num_bytes <= ROUND_BYTES + OVERHEAD_BYTES + 4 * len(sent), "besides the lengths of the records"
