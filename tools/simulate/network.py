"""Processes that call each other through memory, with delay, loss, partitions, deaths and suspension."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from exo_mesh.errors import DeadlineError, MeshError, TransportError
from exo_mesh.mesh.membership.port import ControlPort
from exo_mesh.wire.peer_call import AnyRow, PeerCall, PeerStream, Q, R
from tools.simulate.virtual_loop import PROCESS, VirtualLoop

OVERHEAD_BYTES = 160
"""Bytes per message of a unary call on an open connection, besides the protobuf. 120 were measured on the loopback
(`python -m tools.simulate.measure_overhead`); TLS adds 22 to 40."""

PING_S = 2.0
"""A stream on which nothing passes is broken after this time, by unanswered pings."""


def host_of(address: str) -> str:
    return address.partition(":")[0]


@dataclass(slots=True)
class Process:
    """One start of a node."""

    name: str
    address: str
    context: contextvars.Context
    answers: dict[AnyRow, Any] = field(default_factory=dict)
    """What this process answers to calls, by their rows."""
    alive: bool = True
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


@dataclass(slots=True)
class Network:
    """The network. loss: share of lost messages; a lost message is never resent, so it is harsher than TCP."""

    loop: VirtualLoop
    rng: random.Random
    delay_s: tuple[float, float] = (0.0003, 0.003)
    loss: float = 0.0
    processes: dict[str, Process] = field(default_factory=dict)
    islands: list[set[str]] = field(default_factory=list)
    listens: Callable[[str], bool] = lambda endpoint: False
    """Whether there is a runner at this data port."""
    messages: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    frozen: set[str] = field(default_factory=set)
    """Hosts on which every process is suspended, runners too; their kernels still accept connections."""
    deaf: set[frozenset[str]] = field(default_factory=set)
    """Pairs of hosts between which no call completes. Loss in one direction is enough for that, because TCP needs
    both."""
    _starts: int = 0

    def begin(self, address: str) -> Process:
        """Starts a new process at an address, replacing the one before."""
        self._starts += 1
        context = contextvars.copy_context()
        name = f"{address}#{self._starts}"
        context.run(PROCESS.set, name)
        self.processes[address] = process = Process(name, address, context)
        return process

    def start(self, process: Process, work: Any) -> asyncio.Task[Any]:
        """Runs a coroutine as part of a process."""
        task = self.loop.create_task(work, context=process.context.copy())
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
        return task

    def kill(self, process: Process) -> None:
        """Kills a process as by SIGKILL: none of it runs again; its port refuses."""
        process.alive = False
        self.loop.stop_process(process.name)

    def freeze(self, process: Process) -> None:
        """Suspends a host, as when a laptop's lid is closed: its node and its runners stop together."""
        self.frozen.add(host_of(process.address))
        self.loop.stop_process(process.name)

    def wake(self, process: Process) -> None:
        """Wakes the host with everything that runs there."""
        self.frozen.discard(host_of(process.address))
        self.loop.wake_process(process.name)

    def split(self, *islands: Collection[str]) -> None:
        """Splits the network: only addresses of one island reach each other; without an argument it is healed."""
        self.islands = [set(island) for island in islands]

    def cut(self, one: Process, other: Process) -> None:
        """Separates two hosts from now on; the rest of the mesh reaches both."""
        self.deaf.add(frozenset((host_of(one.address), host_of(other.address))))

    def connected(self, one: str, other: str) -> bool:
        if frozenset((host_of(one), host_of(other))) in self.deaf:
            return False
        return all((one in island) == (other in island) for island in self.islands)

    def arrives(self, one: str, other: str) -> bool:
        return self.connected(one, other) and self.rng.random() >= self.loss

    def count(self, address: str, message: Any) -> None:
        self.messages[address] += 1
        self.num_bytes[address] += message.ByteSize() + OVERHEAD_BYTES

    async def pause(self) -> None:
        await asyncio.sleep(self.rng.uniform(*self.delay_s))


class SimClient(ControlPort):
    """Calls another process through memory, by its answers."""

    datagrams = None

    def __init__(self, network: Network, own_address: str, address: str) -> None:
        self.address = address
        self._network = network
        self._own = own_address
        self._reports = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def at(self, address: str) -> SimClient:
        return SimClient(self._network, self._own, address)

    async def close(self) -> None:
        """Does nothing: there is no connection to close; running calls end by themselves."""

    async def connects(self, timeout_s: float) -> bool:
        """Whether a runner answers at its data port. A runner lives as long as its node, which may be suspended
        alone."""
        await self._network.pause()
        if host_of(self.address) in self._network.frozen or not self._reaches():
            await asyncio.sleep(timeout_s)
            return False
        return self._network.listens(self.address)

    async def is_refused(self, timeout_s: float) -> bool:
        await self._network.pause()
        process = self._network.processes.get(self.address)
        is_there = process.alive if process is not None else self._network.listens(self.address)
        return not is_there and self._reaches()

    def _reaches(self) -> bool:
        host = host_of(self.address)
        return any(
            self._network.connected(self._own, one) for one in self._network.processes if host_of(one) == host
        )  # fmt: skip

    async def close_when_idle(self) -> None:
        await self._idle.wait()

    async def call(self, row: PeerCall[Q, R], request: Q, timeout_s: float | None = None) -> R:
        deadline_s = row.deadline_s if timeout_s is None else timeout_s
        caller = f"ipv4:{self._own}"
        reply: R = await self._call(lambda process: process.answers[row].function(request, caller), request, deadline_s)
        return reply

    async def stream(self, row: PeerStream[Q, R], request: Q, *, quiet: bool = False) -> AsyncGenerator[R, None]:
        """Streams what the peer yields, until either end is gone or nothing has passed for PING_S."""
        network = self._network
        self._reports += 1
        self._idle.clear()
        server: asyncio.Task[None] | None = None
        caller = network.processes[self._own]  # an address may have a new process later
        try:
            await network.pause()
            process = network.processes.get(self.address)
            if process is None or not network.arrives(self._own, self.address):
                await asyncio.sleep(PING_S)
                raise TransportError(f"{self.address} cannot be reached")
            if not process.alive:
                raise TransportError(f"{self.address} refuses")
            items: asyncio.Queue[R | MeshError | None] = asyncio.Queue()
            server = network.start(process, self._serve(caller, process, row, request, items))
            silent_s = 0.0
            while silent_s < PING_S:
                try:
                    async with asyncio.timeout(0.5):  # wait_for of Python 3.11 may swallow a cancellation
                        item = await items.get()
                except TimeoutError:
                    reached = network.connected(self._own, self.address) and not network.loop.is_stopped(process.name)
                    silent_s = 0.0 if reached else silent_s + 0.5
                    if not process.alive:
                        raise TransportError(f"{self.address} is gone") from None
                    continue
                if isinstance(item, MeshError):
                    raise item
                if item is None:
                    return
                silent_s = 0.0
                yield item
            raise TransportError(f"{self.address} does not answer pings")
        finally:
            if server is not None:
                server.cancel()
            self._reports -= 1
            if not self._reports:
                self._idle.set()

    async def _serve(
        self, caller: Process, process: Process, row: AnyRow, request: Any, items: asyncio.Queue[Any]
    ) -> None:
        own = asyncio.current_task()
        watch = self._network.start(process, self._watch_caller(caller, process, own))
        try:
            async for status in process.answers[row].function(request):
                await self._network.pause()
                items.put_nowait(status)
            items.put_nowait(None)
        except MeshError as exc:
            items.put_nowait(exc)
        except asyncio.CancelledError:
            items.put_nowait(TransportError(f"the stream to {self.address} is broken"))
            raise
        finally:
            watch.cancel()

    async def _watch_caller(self, caller: Process, process: Process, serving: asyncio.Task[Any] | None) -> None:
        """Ends the call at the server's side when the caller is gone: the server sends pings too."""
        silent_s = 0.0
        while caller.alive and silent_s < PING_S:
            await asyncio.sleep(0.5)
            reached = self._network.connected(self._own, self.address) and not self._network.loop.is_stopped(
                caller.name
            )
            silent_s = 0.0 if reached else silent_s + 0.5
        if serving is not None:
            serving.cancel()

    async def _call(self, method: Callable[[Any], Any], request: Any, timeout_s: float) -> Any:
        network = self._network
        network.count(self._own, request)
        reply: asyncio.Future[Any] = network.loop.create_future()
        reply.add_done_callback(
            lambda reply: None if reply.cancelled() else reply.exception()
        )  # marks an exception as seen
        sent = network.rng.uniform(*network.delay_s)
        nobody = contextvars.Context()
        if network.arrives(self._own, self.address):
            network.loop.call_later(sent, self._deliver, method, reply, context=nobody)
        done, _ = await asyncio.wait((reply,), timeout=timeout_s)
        if not done:
            reply.cancel()
            raise DeadlineError(f"{self.address} did not answer in time")
        return reply.result()

    def _deliver(self, method: Callable[[Any], Any], reply: asyncio.Future[Any]) -> None:
        network = self._network
        process = network.processes.get(self.address)
        if process is None or not process.alive:
            if not reply.done():
                reply.set_exception(TransportError(f"{self.address} refuses"))
        elif not reply.done():
            task = network.start(process, method(process))
            task.add_done_callback(lambda task: self._answer(task, reply), context=contextvars.Context())
            reply.add_done_callback(lambda reply: task.cancel() if reply.cancelled() else None)

    def _answer(self, task: asyncio.Task[Any], reply: asyncio.Future[Any]) -> None:
        network = self._network
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, MeshError):
            raise error
        if task.cancelled() or not network.arrives(self._own, self.address):
            return
        if error is None:
            network.count(self.address, task.result())
        delay = network.rng.uniform(*network.delay_s)

        def arrive() -> None:
            if reply.done():
                return
            if error is not None:
                reply.set_exception(error)
            else:
                reply.set_result(task.result())

        network.loop.call_later(delay, arrive, context=contextvars.Context())

    # no simulation needs these

    @property
    def is_idle(self) -> bool:
        raise NotImplementedError
