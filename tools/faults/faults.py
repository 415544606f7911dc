"""The seven faults of the random runs, and the four moments at which they are injected."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import psutil

from tools.faults.mesh import FaultMesh, Node
from tools.faults.stream import Question, Stream


class Fault(Enum):
    """What is done to a ring."""

    RUNNER_KILL = "runner KILL"
    RUNNER_STOP = "runner STOP"
    NODE_KILL = "node KILL"
    NODE_STOP = "node STOP"
    MACHINE_STOP = "machine STOP"
    RESET = "TCP reset"
    ONE_WAY_LOSS = "one-way loss"

    @property
    def hits_the_node(self) -> bool:
        return self in (Fault.NODE_KILL, Fault.NODE_STOP, Fault.MACHINE_STOP)


class Phase(Enum):
    """When it is done: detected in the stream and on the hops of the ring, never by waiting for a time."""

    PREFILL = "prefill"  # the first stage has begun to send activations of the prompt to the second
    FIRST_TOKEN = "first token"
    MID_DECODE = "mid-decode"
    LAST_TOKEN = "last token"  # all but the last few characters have arrived


LAST_CHARACTERS = 6
PREFILL_BYTES = 2048
"""Bytes that only the activations of a prompt reach. A ping and its answer are tens of bytes."""


@dataclass
class Struck:
    """The effect of a fault, and how to end it."""

    what: str
    heal: Callable[[], None] = lambda: None
    gone: list[Node] = field(default_factory=list)
    """Nodes that were killed."""


class Moment:
    """Waits for a phase. Create it before the request; `wait` returns when the phase has come, False if the stream
    ended before."""

    def __init__(self, phase: Phase, mesh: FaultMesh, instance: dict[str, Any]) -> None:
        self.phase = phase
        self._prefill = threading.Event()
        if phase is Phase.PREFILL:
            first, second = (mesh.node_of(stage["peer"]).number for stage in instance["stages"][:2])
            self._prefill = mesh.proxy.when_passed((first, second), PREFILL_BYTES)

    def wait(self, stream: Stream, question: Question) -> bool:
        if self.phase is Phase.PREFILL:
            assert self._prefill.wait(30), "no activations of the prompt within 30 s"
            return not stream.ended.is_set()
        length = {
            Phase.FIRST_TOKEN: 1,
            Phase.MID_DECODE: len(question.answer) // 2,
            Phase.LAST_TOKEN: len(question.answer) - LAST_CHARACTERS,
        }[self.phase]
        return stream.await_text(length) and not stream.ended.is_set()


def strike(fault: Fault, mesh: FaultMesh, instance: dict[str, Any], victim: int) -> Struck:
    """Injects a fault at the victim-th stage of a ring: its runner, its node, both, or its hop to the next stage."""
    stages = instance["stages"]
    stage, following = stages[victim], stages[(victim + 1) % len(stages)]
    node, after = mesh.node_of(stage["peer"]), mesh.node_of(following["peer"])
    where = f"stage {victim} of {len(stages)}"
    if fault is Fault.RUNNER_KILL:
        os.kill(stage["pid"], signal.SIGKILL)
        return Struck(f"runner of {where}")
    if fault is Fault.RUNNER_STOP:
        os.kill(stage["pid"], signal.SIGSTOP)
        return Struck(f"runner of {where}", lambda: _wake(stage["pid"]))
    if fault is Fault.NODE_KILL:
        node.send(signal.SIGKILL)
        return Struck(f"node of {where}", gone=[node])
    if fault is Fault.NODE_STOP:
        node.send(signal.SIGSTOP)
        return Struck(f"node of {where}", lambda: node.send(signal.SIGCONT))
    if fault is Fault.MACHINE_STOP:
        node.freeze()
        return Struck(f"machine of {where}", node.thaw)
    if fault is Fault.RESET:
        mesh.proxy.reset(node.number, after.number)
        return Struck(f"all connections between stages {victim} and {(victim + 1) % len(stages)}")
    way = (node.number, after.number)
    mesh.proxy.hold(way)
    return Struck(f"from stage {victim} to {(victim + 1) % len(stages)}", lambda: mesh.proxy.release(way))


def _wake(pid: int) -> None:
    """Continues a stopped process if it still exists: its node may have ended it."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        assert not psutil.pid_exists(pid)
