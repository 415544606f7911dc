"""The bare gRPC stream beside `exo-mesh bench ring`."""

from __future__ import annotations

import datetime
import subprocess
import sys

import pytest

from exo_mesh.cli.bench.raw_grpc import raw_stream
from exo_mesh.errors import EngineError
from exo_mesh.security.certificates import issue
from exo_mesh.security.secret import new_secret
from exo_mesh.wire.bare_stream import MESSAGE_BYTES


@pytest.mark.extended
@pytest.mark.parametrize("is_closed", [False, True])
def test_one_stream_measures_hops_and_bandwidth_in_turns(*, is_closed: bool) -> None:
    own = issue(new_secret(), "bench", ["127.0.0.1"], datetime.datetime.now(datetime.UTC)) if is_closed else None
    with raw_stream(None, own) as raw:
        p50, p99 = raw.ping_pong(100, 20)
        assert 0 < p50 <= p99
        assert raw.bulk(MESSAGE_BYTES + 1, 2) > 0
        assert raw.ping_pong(100, 20)[0] > 0


@pytest.mark.extended
def test_the_receiver_ends_with_its_parent_and_a_dead_sender_is_an_error() -> None:
    command = [sys.executable, "-m", "exo_mesh.wire.bare_stream", "receive"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdin is not None and receiver.stdout is not None
        receiver.stdin.write(b"null\n")
        receiver.stdin.flush()
        assert int(receiver.stdout.readline()) > 0
        receiver.stdin.close()
        assert receiver.wait(30) == 0
    with raw_stream(None, None) as raw:
        assert raw.ping_pong(100, 2)[0] > 0
        raw.child.process.kill()
        raw.child.process.wait(30)
        with pytest.raises(EngineError):
            raw.ping_pong(100, 2)
