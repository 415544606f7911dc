"""A runner's place on the ring: its data-plane server and the hop to the next stage."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from exo_mesh import PROTOCOL_VERSION
from exo_mesh.errors import TransportError
from exo_mesh.proto import driver_pb2_grpc
from exo_mesh.proto import ring_pb2 as ring_pb
from exo_mesh.proto import runner_pb2 as pb
from exo_mesh.runner.driver_service import DriverService
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
        before = (setup.index - 1) % stages
        self._receiver = RingReceiver(PROTOCOL_VERSION, plan.instance_id, plan.ballot, before, worker.accept)

    async def listen(self, binding: Binding) -> int:
        """Start the server; answers the port. Raises TransportError if no port of the range is free."""
        server = new_server()
        server.add_generic_rpc_handlers((self._receiver.handler(),))
        if self._setup.is_last:
            service = DriverService(self._setup.plan, self._worker)
            driver_pb2_grpc.add_DriverServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        port = _bind(server, binding, self._credentials)
        await server.start()
        self._server = server
        return port

    def link_to(self, endpoint: str, keep_stream: bool) -> None:
        """The next stage listens at `endpoint`. keep_stream: dial there only when the present stream breaks."""
        self._link.set_endpoint(endpoint, keep_stream=keep_stream)

    async def run(self) -> None:
        """Work and keep the hop up, until the ring shuts down. Raises StageLostError if the next stage is gone."""
        async with asyncio.TaskGroup() as group:
            hop = group.create_task(self._link.run()) if self._setup.num_stages > 1 else None
            await self._worker.run(self._link.send)
            if hop is not None:
                hop.cancel()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=0.2)

    def heartbeat(self) -> pb.Heartbeat:
        """The counters of this moment."""
        worker, link, driver = self._worker, self._link, self._worker.driver
        engine, clock = worker.engine, worker.clock
        beat = pb.Heartbeat(
            progress=worker.progress,
            busy_s=worker.busy_s,
            frames_in=self._receiver.frames_in,
            frames_out=link.frames_out,
            bytes_out=link.bytes_out,
            linked=link.linked or self._setup.num_stages == 1,
            sequences=len(engine.sequences()) if engine else 0,
            memory_bytes=engine.memory_bytes() if engine else 0,
            computing_tokens=clock.tokens,
            computing_prefill=clock.is_prefill,
            expected_s=clock.expected_s(),
            prefill_frames=clock.prefill_frames,
            decode_frames=clock.decode_frames,
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
