"""The bare gRPC stream beside `exo-mesh bench ring`."""

from __future__ import annotations

import datetime

import pytest

from exo_mesh.bench.raw_grpc import MESSAGE_BYTES, raw_stream
from exo_mesh.security.certificates import issue
from exo_mesh.security.secret import new_secret


@pytest.mark.extended
@pytest.mark.parametrize("is_closed", [False, True])
def test_one_stream_measures_hops_and_bandwidth_in_turns(*, is_closed: bool) -> None:
    own = issue(new_secret(), "bench", ["127.0.0.1"], datetime.datetime.now(datetime.UTC)) if is_closed else None
    with raw_stream(None, own) as raw:
        p50, p99 = raw.ping_pong(100, 20)
        assert 0 < p50 <= p99
        assert raw.bulk(MESSAGE_BYTES + 1, 2) > 0
        assert raw.ping_pong(100, 20)[0] > 0
