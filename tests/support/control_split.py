"""A control plane that can be cut between groups of nodes in one process: calls and datagrams between them fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.errors import TransportError
from exo_mesh.node.node import Node
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.probes.port import ProbePort
from tests.support.nodes import GB, Machine, knows_all, make_node, runners, until

_caller: ContextVar[str] = ContextVar("caller", default="")


class Cable:
    """Knows who calls (every task of a node inherits its name) and whom (by port). Data planes are left alone."""

    def __init__(self) -> None:
        self.groups: tuple[frozenset[str], ...] = ()
        self._ports: dict[str, str] = {}

    def split(self, *groups: set[str]) -> None:
        """From now on nodes of different groups cannot call each other; open streams break."""
        self.groups = tuple(frozenset(group) for group in groups)

    def heal(self) -> None:
        self.groups = ()

    def plug_in(self, node: Node) -> None:
        self._ports[str(node.grpc_port)] = node.settings.name

    def is_cut(self, caller: str, address: str) -> bool:
        callee = self._ports.get(address.rpartition(":")[2], "")
        return bool(self.groups) and not any({caller, callee} <= group for group in self.groups)


def install(cable: Cable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the cable between all control clients and the network."""
    begin, call, items = ControlClient.__init__, ControlClient.call, ControlClient.stream
    ask = ProbePort.ask

    def new_begin(client: ControlClient, *args: Any, **options: Any) -> None:
        begin(client, *args, **options)
        client.caller = _caller.get()  # type: ignore[attr-defined]

    def check(client: Any) -> None:
        if cable.is_cut(client.caller, client.address):
            raise TransportError(f"{client.address} is cut off from {client.caller}")

    async def new_call(client: ControlClient, *args: Any) -> Any:
        check(client)
        return await call(client, *args)

    async def new_items(client: ControlClient, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        source = items(client, *args, **options)
        while True:
            check(client)
            following = asyncio.ensure_future(anext(source))  # type: ignore[arg-type]
            try:
                while not following.done():
                    await asyncio.wait((following,), timeout=0.05)
                    check(client)
                yield following.result()
            except StopAsyncIteration:
                return
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def new_ask(port: ProbePort, address: str, *args: Any) -> Any:
        return None if cable.is_cut(_caller.get(), address) else await ask(port, address, *args)

    monkeypatch.setattr(ProbePort, "ask", new_ask)
    monkeypatch.setattr(ControlClient, "__init__", new_begin)
    monkeypatch.setattr(ControlClient, "call", new_call)
    monkeypatch.setattr(ControlClient, "stream", new_items)


@asynccontextmanager
async def cabled_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, usable_bytes: tuple[int, ...] = (), **options: Any
) -> AsyncIterator[tuple[Cable, list[Node]]]:
    """Nodes n0, n1, … that all know each other. At the end they stop, and leave no runner."""
    cable, nodes = Cable(), []
    install(cable, monkeypatch)
    try:
        for index in range(count):
            machine = Machine(usable_bytes[index] if usable_bytes else 8 * GB)
            bootstrap = (f"127.0.0.1:{nodes[0].grpc_port}",) if nodes else ()
            node = make_node(tmp_path / f"n{index}", f"n{index}", machine, bootstrap_peers=bootstrap, **options)
            nodes.append(node)
            context = copy_context()
            context.run(_caller.set, node.settings.name)
            await asyncio.create_task(node.start(), context=context)
            cable.plug_in(node)
        await until(lambda: all(knows_all(node, count) for node in nodes))
        yield cable, nodes
    finally:
        cable.heal()
        await asyncio.gather(*(node.stop() for node in nodes))
    assert not runners(), "a runner outlived its node"
