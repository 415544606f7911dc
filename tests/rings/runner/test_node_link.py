"""The link to the node ends a runner with its node, so a runner without one must not live."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from exo_mesh.wire.proto import runner_pb2 as pb
from exo_mesh.wire.runner_pipe import receive_message, socket_pair

RUNNER = """
import socket, sys, time
from exo_mesh.errors import EngineError
from exo_mesh.rings.runner.node_link import NodeLink

def heartbeat():
    raise {error}

NodeLink(socket.socket(fileno=int(sys.argv[1])), heartbeat, print, print).start()
time.sleep(30)
"""


def runner_with(error: str, pipe: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", RUNNER.format(error=error), str(pipe.fileno())],
        pass_fds=(pipe.fileno(),),
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("error", "code"), [("EngineError('the device hangs')", "engine_error"), ("RuntimeError('a bug')", "")]
)
def test_a_heartbeat_that_cannot_be_made_ends_the_process_and_says_why_if_it_can(error: str, code: str) -> None:
    ours, theirs = socket_pair()
    with ours, runner_with(error, theirs) as runner:
        theirs.close()
        ours.settimeout(20)
        last = receive_message(ours, pb.FromRunner)
        assert (last.failed.code if last else "") == code
        assert runner.wait(10) != 0
