"""Meshes of real `exo-mesh serve` processes on the loopback, each with a home and ports of its own."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.child_node import ChildNode, ReadyNode, stop_all
from exo_mesh.cli.client.child_node import start_node as start_child
from exo_mesh.errors import MeshError
from tests.support.processes import clean_environ, eventually, gone

MODEL = "exo-mesh-demo"
START_S = 60.0
PLACE_S = 90.0
ANSWER_S = 60.0
TRACES = ("Traceback (most recent call last)", "Fatal Python error", "Segmentation fault")


@dataclass(frozen=True)
class Peer(ReadyNode):
    """One node: its process, and how to call it."""

    child: ChildNode
    ready: dict[str, Any]

    @property
    def log(self) -> str:
        return self.child.log

    def runners(self) -> list[psutil.Process]:
        """Runner processes of this node."""
        return self.child.runners()

    def place(self, **wish: Any) -> dict[str, Any]:
        """POST /instance and wait until it is ready."""
        try:
            instance: dict[str, Any] = self.api.post("/instance", {"model": MODEL, **wish}, PLACE_S)
        except MeshError as exc:
            exc.add_note(self.child.log_tail(30))
            raise
        return instance

    def chat(self, question: str | list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        """The whole reply to a question, greedy unless the fields say otherwise."""
        reply: dict[str, Any] = self.api.post("/v1/chat/completions", chat_body(question, **fields), ANSWER_S)
        return reply

    def idle(self) -> bool:
        """Do its stages hold no sequence, as their last heartbeats say?"""
        beats = self.state()["stages_here"].values()
        return all(beat["sequences"] == beat["running"] == beat["queued"] == 0 for beat in beats)

    def busy(self) -> bool:
        """Does each stage here hold a sequence?"""
        beats = self.state()["stages_here"].values()
        return bool(beats) and all(beat["sequences"] > 0 for beat in beats)


def chat_body(question: str | list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    return {"model": MODEL, "messages": messages, "temperature": 0, **fields}


def text_of(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


@contextmanager
def mesh(root: Path, flags: Sequence[Sequence[str]], *, engine: str = "mlx") -> Iterator[list[Peer]]:
    """One node per item of `flags`, all of which know each other, as those with an API say. Afterwards no process of
    theirs is left, and none of them has written a traceback."""
    children: list[ChildNode] = []
    family: list[psutil.Process] = []
    unharmed: list[ChildNode] = []
    ports = control_ports(len(flags))
    try:
        for index, own in enumerate(flags):  # side by side; whichever is ready later dials the others
            others = ",".join(f"127.0.0.1:{port}" for port in ports if port != ports[index])
            control = ["--grpc-port", str(ports[index]), *(["--bootstrap-peers", others] if others else [])]
            children.append(start_node(root / f"peer-{index}", [*control, *own], engine=engine))
        peers = [Peer(child, child.wait_ready(START_S)) for child in children]
        for peer in (peer for peer in peers if peer.url):
            assert eventually(partial(peer.knows, {one.id for one in peers}, MODEL), 30), peer.child.log_tail(30)
        yield peers
        family = [process for peer in peers if peer.child.alive for process in peer.runners()]
        unharmed = [child for child in children if child.alive]
    finally:
        stop_all(children)
    assert eventually(lambda: gone(family), 3), "a runner outlived its node"
    unclean = [
        f"exit code {child._process.returncode}; {child.log_tail(30)}"
        for child in unharmed
        if child._process.returncode != exit_codes.OK
    ]
    assert not unclean, "not a clean stop:\n" + "\n".join(unclean)
    for peer in peers:
        assert not [word for word in TRACES if word in peer.log], peer.log[-4000:]


def control_ports(count: int) -> list[int]:
    """Free ports below those that systems give to whoever asks for any: nobody takes one before its node does."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            found += [] if port in found else [port]
    return found


def bootstrap(peers: Sequence[Peer]) -> list[str]:
    return ["--bootstrap-peers", peers[0].grpc_address] if peers else []


def start_node(home: Path, flags: Sequence[str], *, engine: str = "mlx") -> ChildNode:
    """A node that hears only what its flags say. It ends when this process does."""
    environ = {**clean_environ(home), "HF_HUB_CACHE": str(home / "hub")}
    return start_child(home, ["--engine", engine, *flags], environ)


def await_all(peers: Sequence[Peer], condition: Callable[[Peer], bool], deadline_s: float = 15.0) -> None:
    """The test fails with the state of the first peer for which it does not become true in time."""
    for peer in peers:
        assert eventually(lambda peer=peer: condition(peer), deadline_s), json.dumps(peer.state())  # type: ignore[misc]
