"""A runner that misbehaves in any way is ended in time, and what it did is reported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time

import psutil
import pytest
from msgspec import structs
from msgspec.structs import replace

from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.stage import StageFailed, StageListening, StageReady
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.rings.hosting.runner_exit import End
from exo_mesh.rings.hosting.supervisor import Runner
from exo_mesh.wire.runner_commands import StartStage
from tests.support.nodes import until

QUICK = RunnerLimits(first_message_s=20.0, silence_s=0.6, load_base_s=0.3, polite_s=0.3, terminate_s=0.3)

PREAMBLE = """
import socket, struct, sys, time
sys.path[:0] = {path!r}
from exo_mesh.wire.proto import runner_pb2 as pb
pipe = socket.socket(fileno=int(sys.argv[sys.argv.index("--control-fd") + 1]))
def say(message):
    data = message.SerializeToString()
    pipe.sendall(struct.pack("<I", len(data)) + data)
pipe.recv(65536)
"""


def runner(script: str, limits: RunnerLimits = QUICK) -> Runner:
    stage = StagePlan("me", "dummy", Shard("m", 0, 4, 4), 1)
    plan = Plan("m-1", Ballot(1, "me"), "m", "d", (stage,), 64, PlanInputs((("me", 9),), "memory", 1))
    start = StartStage(plan=plan, stage=0)
    command = (sys.executable, "-c", PREAMBLE.format(path=sys.path) + script)
    return Runner("m-1[0:4]", start, "127.0.0.1", limits=limits, command=command)


async def verdict(script: str, limits: RunnerLimits = QUICK) -> tuple[str, str]:
    """(code, message) that the run ends with."""
    one = runner(script, limits)
    await asyncio.wait_for(one.run(), 20)
    assert one.board.failed is not None
    return one.board.failed.code, one.board.failed.message


READY = "say(pb.FromRunner(listening=pb.Listening(port=5, pid=7))); say(pb.FromRunner(ready=pb.Ready()))\n"


BEATS_ONLY = "while True: say(pb.FromRunner(heartbeat=pb.Heartbeat())); time.sleep(0.1)"


HANGING = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1, all_threads=True)
print("Who sent this? The prompt said: thread 5, 6, 7", flush=True)
def hang():
    while True:
        say(pb.FromRunner(heartbeat=pb.Heartbeat(computing_tokens=3)))
        time.sleep(0.05)
"""


async def test_the_stacks_of_a_runner_are_asked_for_and_with_hang_debug_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "exo_mesh.rings.hosting.supervisor")
    one = runner(HANGING + READY + "hang()", replace(QUICK, stacks_every_s=0.2))
    assert await one.stacks() == [], "it has not been started"
    running = asyncio.create_task(one.run())
    await until(lambda: one.board.ready)
    lines = await one.stacks()
    assert lines[0].endswith("(most recent call first):") and any(line.endswith("in hang") for line in lines)
    assert not any("5, 6, 7" in line for line in lines), "what else it prints is left out"
    await until(lambda: caplog.text.count("has made no progress") >= 2)
    await one.stop()
    await running
    assert await one.stacks() == [] and one.end is End.STOPPED
    assert "stacks" in [entry["phase"] for entry in one.flight.describe()]


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("sys.exit(3)", "stage_lost", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "stage_lost", "was killed by SIGKILL"),
        ("print('out of paper'); sys.exit(1)", "stage_lost", "its last output: out of paper"),
        ("say(pb.FromRunner(failed=pb.Failed(code='engine_error', message='no GPU')))", "engine_error", "no GPU"),
        (READY + "time.sleep(60)", "deadline_exceeded", "silent for 1 s"),
        ("pipe.sendall(b'\\xff' * 64); time.sleep(60)", "transport_error", "announces a message of"),
        (BEATS_ONLY, "deadline_exceeded", "not loaded"),
        (READY + "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)", "deadline_exceeded", "silent"),
    ],
)
async def test_every_end_is_named(script: str, code: str, message: str) -> None:
    ended = await verdict(script)
    assert ended[0] == code and message in ended[1]


BEAT = "say(pb.FromRunner(heartbeat=pb.Heartbeat({})))\n"
IN_A_FRAME = READY + "while True:\n " + BEAT.format("computing_tokens=4, expected_s=0.01") + " time.sleep(0.1)"
STANDS_STILL = "while True:\n " + BEAT.format("progress=1") + " time.sleep(0.1)"


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("sys.exit(3)", End.CRASHED),
        (READY + "sys.exit(3)", End.CRASHED),
        ("say(pb.FromRunner(failed=pb.Failed(code='engine_error', message='no GPU')))", End.CRASHED),
        ("say(pb.FromRunner(failed=pb.Failed(code='stage_lost', message='the next one is gone')))", End.LOST),
        ("say(pb.FromRunner(failed=pb.Failed(code='invalid_request', message='no such option')))", End.REFUSED),
        ("say(pb.FromRunner(failed=pb.Failed(code='rank_lost', message='rank 1 is gone')))", End.LOST),
        ("say(pb.FromRunner(failed=pb.Failed(code='canary_failed', message='layer 3 differs')))", End.REFUSED),
        (STANDS_STILL, End.WEDGED),
        ("raise MemoryError", End.OOM),
        ("say(pb.FromRunner(failed=pb.Failed(code='engine_error', message='CUDA out of memory')))", End.OOM),
        ("import os; os.kill(os.getpid(), 9)", End.CRASHED),
        (READY + "time.sleep(60)", End.STALLED),
        (IN_A_FRAME, End.STALLED),
    ],
)
async def test_each_end_says_whether_it_may_be_tried_again(script: str, end: End) -> None:
    one = runner(script, replace(QUICK, decode_s=0.5))
    told: list[End] = []
    await asyncio.wait_for(one.run(on_end=lambda kind, why: told.append(kind)), 20)
    assert one.end is end and told == [end]


@pytest.mark.parametrize("script", [STANDS_STILL, IN_A_FRAME])
async def test_a_rank_that_gets_on_no_more_may_wait_for_another_one(script: str) -> None:
    one = runner(script, replace(QUICK, decode_s=0.5))
    one._start = structs.replace(one._start, rank=RankWiring("ring", 0, ("a:1", "b:2")))
    await asyncio.wait_for(one.run(), 20)
    assert one.end is End.LOST


async def test_the_exit_is_seen_though_a_child_of_the_runner_holds_its_pipe_open() -> None:
    script = "import subprocess; subprocess.Popen(['sleep', '60'], pass_fds=[pipe.fileno()]); sys.exit(3)"
    one = runner(script, replace(QUICK, silence_s=60, first_message_s=60))
    await asyncio.wait_for(one.run(), 20)
    assert one.board.failed is not None and "exit code 3" in one.board.failed.message
    await until(lambda: not alive_in_group(one.pid), 5)


def alive_in_group(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


async def test_a_frozen_runner_is_killed_without_being_asked_first() -> None:
    one = runner(READY + "import os; os.kill(os.getpid(), 19)", replace(QUICK, terminate_s=60, polite_s=60))
    await asyncio.wait_for(one.run(), 20)
    assert one.end is End.STALLED
    assert [entry["phase"] for entry in one.flight.describe()][-3:] == ["end", "SIGKILL", "exit"]


async def test_a_failure_is_told_before_the_process_is_gone() -> None:
    script = "import signal; signal.signal(15, signal.SIG_IGN)\n" + READY + "while True: time.sleep(1)"
    one = runner(script)
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(10):
        async for update in one.board.watch():
            if isinstance(update, StageFailed):
                break
    assert not running.done()
    await running


async def test_a_runner_that_never_speaks_is_ended() -> None:
    code, message = await verdict("time.sleep(60)", RunnerLimits(first_message_s=0.5, terminate_s=0.3))
    assert code == "deadline_exceeded" and "silent" in message


async def test_a_program_that_does_not_exist_is_an_engine_error() -> None:
    one = runner("")
    one._command = ("/no/such/program",)
    await one.run()
    assert one.board.failed is not None and one.board.failed.code == "engine_error"


async def test_stop_ends_even_a_stubborn_runner_in_time() -> None:
    one = runner(READY + "import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: time.sleep(1)")
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(10):
        async for update in one.board.watch():
            if isinstance(update, StageReady):
                break
    begin = time.monotonic()
    await one.stop()
    assert time.monotonic() - begin < 2
    await running


async def test_cancelling_the_owner_ends_the_process_too() -> None:
    one = runner(READY + "time.sleep(60)", RunnerLimits(silence_s=60, polite_s=0.2, terminate_s=0.5))
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(10):
        async for update in one.board.watch():
            if isinstance(update, StageReady):
                break
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(one.pid, 0)


async def test_watchers_see_what_was_before_and_the_end() -> None:
    one = runner(READY + "sys.exit(0)")
    await one.run()
    kinds = [type(update) async for update in one.board.watch()]
    assert kinds == [StageListening, StageReady, StageFailed]
