"""The link to the node ends a runner with its node, so a runner without one must not live."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from exo_mesh.domain.runner.reports import RunnerFailed
from exo_mesh.wire.runner_pipe import open_pipe, read_report, socket_pair

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
async def test_a_heartbeat_that_cannot_be_made_ends_the_process_and_says_why_if_it_can(error: str, code: str) -> None:
    ours, theirs = socket_pair()
    with runner_with(error, theirs) as runner:
        theirs.close()
        reader, writer = await open_pipe(ours)
        async with asyncio.timeout(20):
            last = await read_report(reader)
        assert (last.code if isinstance(last, RunnerFailed) else "") == code
        writer.close()
        assert runner.wait(10) != 0
