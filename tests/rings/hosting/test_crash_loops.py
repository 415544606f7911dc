"""Whole nodes whose runners crash or get stuck: how often they are tried, where else, and what the caller is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.errors import CrashLoopError, QuarantinedError
from exo_mesh.machine.disk import Disk
from exo_mesh.node.node import Node
from exo_mesh.rings.hosting.pid_files import PidFiles
from exo_mesh.rings.hosting.supervisor import RUNNER_COMMAND
from tests.rings.hosting.test_supervisor import PREAMBLE
from tests.support.nodes import MODEL, a_request, mesh, tokens, until

QUICK = RunnerLimits(first_message_s=20.0, load_base_s=1.0, load_step_s=1.0, load_bytes_per_s=1e12, terminate_s=0.3)


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", PREAMBLE.format(path=sys.path) + text)


CRASHES = script("print('out of paper'); sys.exit(7)")
STUCK = script("while True: say(pb.FromRunner(heartbeat=pb.Heartbeat())); time.sleep(0.1)")


def spawned(node: Node) -> int:
    return len(node._hosting.runner_history.flights.logs)


def codes(node: Node) -> list[str]:
    return [reason.code for reason in node.observation.health().reasons]


async def test_a_model_whose_runner_always_crashes_is_given_up_with_the_cause(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, commands=(CRASHES,)) as (node,):
        with pytest.raises(CrashLoopError, match=r"crashed 3 times.*exit code 7.*out of paper"):
            await tokens(node, a_request())
        assert spawned(node) == 3
        with pytest.raises(CrashLoopError):
            await tokens(node, a_request("again"))
        assert spawned(node) == 3, "no fourth launch"
        await until(lambda: codes(node) == ["crash_loop"])
        assert node.observation.health().status == "degraded"
        assert node._hosting.host.memory.reserved_bytes == 0


@pytest.mark.extended
async def test_after_three_crashes_it_is_placed_on_another_peer(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, commands=(CRASHES, RUNNER_COMMAND)) as nodes:
        assert len(await tokens(nodes[0], a_request())) == 12
        assert [spawned(node) for node in nodes] == [3, 1]
        await until(lambda: codes(nodes[0]) == ["crash_loop"])
        assert codes(nodes[1]) == []


@pytest.mark.extended
async def test_one_that_crashes_there_as_well_is_given_up_after_one_more_try(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, commands=(CRASHES, CRASHES)) as nodes:
        with pytest.raises(CrashLoopError, match="earlier refusals"):
            await tokens(nodes[0], a_request())
        assert [spawned(node) for node in nodes] == [3, 1]


@pytest.mark.extended
async def test_a_load_that_gets_stuck_is_ended_and_the_next_place_is_elsewhere(tmp_path: Path) -> None:
    commands = (STUCK, RUNNER_COMMAND)
    async with mesh(tmp_path, 2, commands=commands, limits=QUICK) as nodes:
        assert len(await tokens(nodes[0], a_request())) == 12
        assert [spawned(node) for node in nodes] == [1, 1], "one wedge is enough"
        await until(lambda: codes(nodes[0]) == ["quarantined"])
        (log,) = nodes[0]._hosting.runner_history.flights.logs
        phases = [entry["phase"] for entry in log.describe() if entry["phase"] != "stop asked"]
        assert phases == ["spawned", "first report", "end", "stacks", "exit"]


async def test_what_got_stuck_is_not_tried_again_after_a_restart(tmp_path: Path) -> None:
    for attempt in range(2):
        async with mesh(tmp_path, 1, commands=(STUCK,), limits=QUICK) as (node,):
            with pytest.raises(QuarantinedError, match="got stuck here"):
                await tokens(node, a_request())
            assert spawned(node) == 1 - attempt
            assert (await node.models.named(MODEL)).instance_ids == ()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], start_new_session=True)


def test_what_an_earlier_start_has_left_is_ended_and_nothing_else(tmp_path: Path) -> None:
    files = PidFiles(tmp_path / "runners", Disk(tmp_path))
    with sleeper() as left, sleeper() as stopped, sleeper() as stranger:
        for process in (left, stopped):
            files.note(process.pid, f"runner {process.pid}")
        os.kill(stopped.pid, signal.SIGSTOP)
        began = psutil.Process(stranger.pid).create_time() - 3600
        (tmp_path / "runners" / "1.json").write_text(json.dumps({"pid": stranger.pid, "began": began, "label": "old"}))
        (tmp_path / "runners" / "2.json").write_text("not one")
        assert sorted(files.reap()) == sorted(f"runner {process.pid}" for process in (left, stopped))
        for process in (left, stopped):
            process.wait(5)  # not the 60 s that it would have slept
        assert stranger.poll() is None, "the pid was given to another program since"
        stranger.kill()
    assert list((tmp_path / "runners").iterdir()) == [] and files.reap() == []
