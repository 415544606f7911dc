"""A runner's place on the ring: its data-plane server and the hop to the next stage."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from exo_mesh import PROTOCOL_VERSION
from exo_mesh.errors import RankLostError, TransportError
from exo_mesh.proto import driver_pb2_grpc
from exo_mesh.proto import ring_pb2 as ring_pb
from exo_mesh.proto import runner_pb2 as pb
from exo_mesh.runner.driver_service import DriverService
from exo_mesh.runner.ranks import RankLinks, watch_leader
from exo_mesh.runner.worker import StageSetup, Worker
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.transport.channel_options import bracketed
from exo_mesh.transport.channels import bind, new_server
from exo_mesh.transport.plan_codec import ballot_to_proto
from exo_mesh.transport.ring_link import RingLink
from exo_mesh.transport.ring_receiver import RingReceiver


@dataclass(frozen=True, slots=True)
class Binding:
    """Where to bind: `host`, and any free port (0, 0) or the first free one of a range."""

    host: str
    port_first: int
    port_last: int


class Endpoint:
    """Made and used on the event loop; `heartbeat` may be called from any thread."""

    def __init__(self, setup: StageSetup, worker: Worker, credentials: CredentialSource | None = None) -> None:
        plan, stages = setup.plan, setup.num_stages
        self._setup = setup
        self._worker = worker
        self._credentials = credentials
        self._server: grpc.aio.Server | None = None
        hello = ring_pb.RingHello(
            protocol=PROTOCOL_VERSION,
            instance_id=plan.instance_id,
            ballot=ballot_to_proto(plan.ballot),
            from_stage=setup.index,
        )
        self._link = RingLink(hello, credentials)
        self._ranks: RankLinks | None = None
        if setup.rank is not None and setup.rank.is_leader:
            self._ranks = RankLinks(hello, setup.rank.size, credentials)
        # a rank that follows gets its frames from the leader of its own stage
        before = setup.index if setup.follows else (setup.index - 1) % stages
        self._receiver = RingReceiver(PROTOCOL_VERSION, plan.instance_id, plan.ballot, before, worker.accept)

    async def listen(self, binding: Binding) -> int:
        """Start the server; answers the port. Raises TransportError if no port of the range is free."""
        server = new_server()
        server.add_generic_rpc_handlers((self._receiver.handler(),))
        if self._worker.driver is not None:
            service = DriverService(self._setup.plan, self._worker)
            driver_pb2_grpc.add_DriverServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        port = _bind(server, binding, self._credentials)
        await server.start()
        self._server = server
        return port

    def link_to(self, endpoint: str, keep_stream: bool) -> None:
        """The next stage listens at `endpoint`. keep_stream: dial there only when the present stream breaks."""
        self._link.set_endpoint(endpoint, keep_stream=keep_stream)

    def ranks_at(self, endpoints: Sequence[str]) -> RankLinks:
        """The hops to the other ranks of this leader's tensor group. Raises RankLostError unless there is one for each
        endpoint."""
        if self._ranks is None or len(self._ranks) != len(endpoints):
            raise RankLostError(f"told of {len(endpoints)} ranks besides itself: the stage does not lead such a group")
        return self._ranks

    async def run(self) -> None:
        """Work and keep the hops up, until the ring shuts down. Raises StageLostError if the next stage is gone, and
        RankLostError if another rank of this tensor group is."""
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(part) for part in self._beside()]
            await self._worker.run(self._link.send, None if self._ranks is None else self._ranks.hand_out)
            for task in beside:
                task.cancel()

    def _beside(self) -> Iterator[Coroutine[Any, Any, None]]:
        """What goes on while the worker works."""
        if self._setup.follows:
            yield watch_leader(self._receiver)
            return
        if self._setup.num_stages > 1:
            yield self._link.run()
        if self._ranks is not None:
            yield self._ranks.run()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=0.2)

    @property
    def _linked(self) -> bool:
        """Every hop that begins here is up."""
        alone = self._setup.num_stages == 1 or self._setup.follows
        return (alone or self._link.linked) and (self._ranks is None or self._ranks.linked)

    def heartbeat(self) -> pb.Heartbeat:
        """The counters of this moment. Raises EngineError if the engine hangs."""
        worker, link, driver = self._worker, self._link, self._worker.driver
        worker.check_alive()
        engine = worker.engine
        beat = pb.Heartbeat(
            progress=worker.progress,
            busy_s=worker.busy_s,
            frames_in=self._receiver.frames_in,
            frames_out=link.frames_out,
            bytes_out=link.bytes_out,
            linked=self._linked,
            sequences=len(engine.sequences()) if engine else 0,
            memory_bytes=engine.memory_bytes() if engine else 0,
        )
        if driver is not None:
            beat.queued, beat.running, beat.tokens = driver.num_waiting, driver.num_running, driver.tokens
            beat.lap_p50_s, beat.lap_p99_s = driver.laps.quantiles()
            beat.laps = driver.laps.count
            driver.describe_load(beat)
        return beat


def _bind(server: grpc.aio.Server, binding: Binding, credentials: CredentialSource | None) -> int:
    for port in range(binding.port_first, binding.port_last + 1):
        try:
            bound = bind(server, f"{bracketed(binding.host)}:{port}", credentials)
        except RuntimeError:
            continue
        if bound:
            return bound
    raise TransportError(f"no free data port on {binding.host} in {binding.port_first}-{binding.port_last}")
