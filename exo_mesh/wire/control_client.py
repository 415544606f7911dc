"""Calls one peer's control endpoint over gRPC. Every call has a deadline; every failure is a MeshError."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any

import grpc
import grpc.aio

from exo_mesh.base.clock import monotonic
from exo_mesh.base.printable import printable
from exo_mesh.base.tasks import was_cancelled
from exo_mesh.errors import (
    DeadlineError,
    MeshError,
    OpenMeshError,
    PeerVersionError,
    StrangerError,
    TransportError,
    error_from_code,
)
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.security.namespace import DEFAULT_NAMESPACE
from exo_mesh.wire.call_access import OwnCalls
from exo_mesh.wire.careful_channel import CarefulChannel, LazyStub
from exo_mesh.wire.channel_options import QUIET, QUIET_REPORTS
from exo_mesh.wire.channels import open_channel
from exo_mesh.wire.gate import CODE_KEY, NAMESPACE_KEY
from exo_mesh.wire.probes.asking import DatagramProbes
from exo_mesh.wire.probes.port import ProbePort
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto import control_pb2_grpc as rpc
from exo_mesh.wire.proto import paths_pb2, paths_pb2_grpc

CALL_S = 5.0
"""Deadline of calls that answer from memory or a local file."""

LOOK_S = 1.5
"""Deadline of a question whose caller has a waiting client and may try another address."""

TEXT_FILES_S = 60.0
"""Deadline for reading text files: a tokenizer may have 20 MB, and the link may be Wi-Fi."""

KEPT_S = 30.0
"""Deadline for reading a kept conversation: it may have 32 MB."""

SURVEY_S = 120.0
"""Deadline for a peer that first has to import an engine's library and trace a model to find its legal cuts."""

SELF_TEST_S = 180.0
"""Deadline for a peer that imports an engine's library, writes a few layers in float32 and computes them."""

INTRODUCE_S = 120.0
"""Deadline for a peer that copies the tokenizer and the headers of a model: up to 150 MB, and the link may be Wi-Fi."""

IDLE_MS = 3000
"""A connection without calls is closed after this time, because its keepalive timer at either end wakes each thread of
gRPC's pool some twenty times, every second. The next call opens it again. Longer than a period of calls to the next
peer, which are the probes where datagrams do not arrive."""

RENEW_S = 2.5
"""gRPC 1.85 closes an idle connection once for each channel: opened again, it stays open. So a call after a pause of
this length uses a new channel. Less than IDLE_MS, because the old one must not have been opened again meanwhile."""

# The membership closes a channel when a peer has died. That cancels the calls on it, and grpc raises CancelledError in
# their callers as if their tasks had been cancelled; a call on a closed channel is a UsageError.
_FAILURES = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError)

_UNREACHED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

# Redial at once: the membership decides whether a peer is alive, not grpc's back-off of up to 120 s. The "minimum" is
# also the timeout of one attempt, and a TLS handshake with a slow board takes long.
_DIAL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.client_idle_timeout_ms", IDLE_MS),
]


class ControlClient:
    """Calls the peer at "host:port". Raises TransportError if it cannot be reached, DeadlineError if it does not
    answer, and the peer's own MeshError if it refuses. probe_port: for probes by datagram; without one, all are
    calls. own_calls: makes the proofs that an open mesh needs for some calls."""

    def __init__(
        self,
        address: str,
        credentials: CredentialSource | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        probe_port: ProbePort | None = None,
        own_calls: OwnCalls | None = None,
    ) -> None:
        self.address = address
        self._credentials = credentials
        self._namespace = namespace
        self._metadata = ((NAMESPACE_KEY, namespace),)
        self._own_calls = None if credentials is not None else own_calls
        self._open()
        self._old_channels: list[grpc.aio.Channel] = []
        self._quiet_channels: set[grpc.aio.Channel] = set()
        self._is_closed = False
        self._loud_calls = 0
        self._last_call_at = math.inf
        """When the last call on `_channel` ended."""
        self._datagrams = None if probe_port is None else DatagramProbes(address, probe_port)
        self._calls = 0
        self._reports = 0
        self._no_report = asyncio.Event()
        self._no_report.set()

    def at(self, address: str) -> ControlClient:
        """A new client with the same credentials and another address."""
        port = None if self._datagrams is None else self._datagrams.port
        return ControlClient(address, self._credentials, self._namespace, port, self._own_calls)

    async def close(self) -> None:
        self._is_closed = True
        await self._channel.close()
        await self._close_old()
        for channel in list(self._quiet_channels):
            await channel.close()

    async def connects(self, timeout_s: float) -> bool:
        """Whether a process of this mesh accepts connections at the address. Makes no call."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            return False
        return True

    async def is_refused(self, timeout_s: float) -> bool:
        """Whether the machine refuses connections at the address. False without an answer."""
        host, _, port = self.address.rpartition(":")
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError, ValueError):
            return False
        writer.close()
        return False

    @property
    def is_idle(self) -> bool:
        """Whether no call and no stream is running."""
        return self._calls == 0

    async def close_when_idle(self) -> None:
        """Close once no stage reports are followed through this client: a verdict of the membership must not end a ring
        with healthy streams. Unanswered pings end the stream of a peer that is really gone."""
        await self._no_report.wait()
        await self.close()

    async def probe_path(self, reply_bytes: int, timeout_s: float) -> paths_pb2.PathProbeReply:
        request = paths_pb2.PathProbeRequest(reply_bytes=reply_bytes)
        reply: paths_pb2.PathProbeReply = await self._call(self._paths.ProbePath, request, timeout_s)
        return reply

    async def hello(self, request: pb.HelloRequest, timeout_s: float) -> pb.HelloReply:
        try:
            reply: pb.HelloReply = await self._call(self._stub.Hello, request, timeout_s)
        except StrangerError:
            raise
        except TransportError as exc:
            if self._credentials is None and "Socket closed" in str(exc):  # how a TLS server answers plain HTTP/2
                raise StrangerError(
                    f"the node at {self.address} closed the connection: its mesh has a secret, but this node has none"
                ) from exc
            raise
        return reply

    async def probe(self, request: pb.ProbeRequest, timeout_s: float, *, by_call: bool = False) -> pb.ProbeReply:
        began = monotonic()
        if self._datagrams is not None and not by_call and (heard := await self._datagrams.ask(request)) is not None:
            return heard
        left_s = max(0.0, timeout_s - (monotonic() - began))
        reply: pb.ProbeReply = await self._call(self._stub.Probe, request, left_s)
        if self._datagrams is not None:
            self._datagrams.called(reply)
        return reply

    async def indirect_probe(self, request: pb.IndirectProbeRequest, timeout_s: float) -> pb.IndirectProbeReply:
        reply: pb.IndirectProbeReply = await self._call(self._stub.IndirectProbe, request, timeout_s)
        return reply

    async def exchange(self, request: pb.ExchangeRequest, timeout_s: float) -> pb.ExchangeReply:
        reply: pb.ExchangeReply = await self._call(self._stub.Exchange, request, timeout_s)
        return reply

    async def goodbye(self, request: pb.GoodbyeRequest, timeout_s: float) -> None:
        await self._call(self._stub.Goodbye, request, timeout_s)

    async def describe_model(self, model: str, engine: str = "") -> pb.DescribeModelReply:
        """With an engine, the reply also has that engine's survey of the model, and the card its legal cuts."""
        request = pb.DescribeModelRequest(model=model, engine=engine)
        deadline_s = SURVEY_S + CALL_S if engine else CALL_S
        reply: pb.DescribeModelReply = await self._call(self._stub.DescribeModel, request, deadline_s)
        return reply

    async def self_test(self, request: pb.SelfTestRequest) -> pb.SelfTestReply:
        deadline_s = SELF_TEST_S + CALL_S
        reply: pb.SelfTestReply = await self._call(self._stub.SelfTest, request, deadline_s)
        return reply

    async def reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        reply: pb.ReserveReply = await self._call(self._stub.Reserve, request, CALL_S)
        return reply

    async def link(self, request: pb.LinkRequest) -> None:
        await self._call(self._stub.Link, request, CALL_S)

    async def look_at_stage(self, request: pb.LookAtStageRequest) -> pb.LookAtStageReply:
        reply: pb.LookAtStageReply = await self._call(self._stub.LookAtStage, request, LOOK_S)
        return reply

    async def release(self, request: pb.ReleaseRequest) -> None:
        # A stage may need all of its 4 s to stop.
        await self._call(self._stub.Release, request, 2 * CALL_S)

    async def cancel(self, request_id: str, key_id: str | None = None) -> bool:
        request = pb.CancelRequest(request_id=request_id, key_id=key_id)
        reply: pb.CancelReply = await self._call(self._stub.Cancel, request, 2.0)
        return reply.found

    async def cancel_on(self, instance_id: str, request_id: str = "") -> int:
        request = pb.CancelRequest(instance_id=instance_id, request_id=request_id)
        reply: pb.CancelReply = await self._call(self._stub.Cancel, request, LOOK_S)
        return reply.count

    async def find_streams(self, request: pb.FindStreamsRequest) -> pb.FindStreamsReply:
        reply: pb.FindStreamsReply = await self._call(self._stub.FindStreams, request, LOOK_S)
        return reply

    async def follow_stream(self, request: pb.FollowStreamRequest) -> AsyncGenerator[pb.FollowReply, None]:
        """Without a deadline: the answer has one at the peer where it entered."""
        async with aclosing(self._items(self._stub.FollowStream, request, None)) as items:
            async for item in items:
                yield item

    async def read_kept(self, request: pb.ReadKeptRequest) -> AsyncGenerator[pb.KeptPart, None]:
        async with aclosing(self._items(self._stub.ReadKept, request, KEPT_S)) as items:
            async for item in items:
                yield item

    async def delete_kept(self, request: pb.DeleteKeptRequest) -> bool:
        reply: pb.DeleteKeptReply = await self._call(self._stub.DeleteKept, request, CALL_S)
        return reply.found

    async def delete_card(self, model: str) -> bool:
        reply: pb.DeleteCardReply = await self._call(self._stub.DeleteCard, pb.DeleteCardRequest(model=model), CALL_S)
        return reply.found

    async def delete_instance(self, fence: pb.Fence, *, is_replaced: bool = False) -> bool:
        request = pb.DeleteInstanceRequest(instance_id=fence.instance_id, fence=fence, replaced=is_replaced)
        reply: pb.DeleteInstanceReply = await self._call(self._stub.DeleteInstance, request, 2 * CALL_S)
        return reply.found

    async def keep_instance(self, instance_id: str, idle_s: float) -> bool:
        request = pb.KeepInstanceRequest(instance_id=instance_id, idle_s=idle_s)
        reply: pb.KeepInstanceReply = await self._call(self._stub.KeepInstance, request, CALL_S)
        return reply.found

    async def stop_node(self, node_id: str, *, restart: bool) -> None:
        await self._call(self._stub.StopNode, pb.StopNodeRequest(restart=restart, node_id=node_id), CALL_S)

    async def wake(self, request: pb.WakeRequest, timeout_s: float) -> int:
        reply: pb.WakeReply = await self._call(self._stub.Wake, request, timeout_s)
        return reply.num_networks

    async def drain(self, node_id: str, *, on: bool) -> None:
        await self._call(self._stub.Drain, pb.DrainRequest(on=on, node_id=node_id), CALL_S)

    async def read_log(self, records: int) -> bytes:
        reply: pb.ReadLogReply = await self._call(self._stub.ReadLog, pb.ReadLogRequest(records=records), CALL_S)
        return reply.json

    async def diagnose(self, request: pb.DiagnoseRequest, timeout_s: float) -> pb.DiagnoseReply:
        reply: pb.DiagnoseReply = await self._call(self._stub.Diagnose, request, timeout_s)
        return reply

    async def read_traces(self, request: pb.ReadTracesRequest, timeout_s: float) -> pb.ReadTracesReply:
        reply: pb.ReadTracesReply = await self._call(self._stub.ReadTraces, request, timeout_s)
        return reply

    async def delete_traces(self, request: pb.DeleteTracesRequest, timeout_s: float) -> int:
        reply: pb.DeleteTracesReply = await self._call(self._stub.DeleteTraces, request, timeout_s)
        return reply.count

    async def capture(self, runner: str, timeout_s: float) -> pb.CaptureReply:
        reply: pb.CaptureReply = await self._call(self._stub.Capture, pb.CaptureRequest(runner=runner), timeout_s)
        return reply

    async def share_keys(self, request: pb.ShareKeysRequest, timeout_s: float) -> pb.ShareKeysReply:
        reply: pb.ShareKeysReply = await self._call(self._stub.ShareKeys, request, timeout_s)
        return reply

    async def introduce(self, model: str, digest: str, *, repo: str = "", revision: str = "") -> None:
        request = pb.IntroduceRequest(model=model, model_digest=digest, repo=repo, revision=revision)
        await self._call(self._stub.Introduce, request, INTRODUCE_S)

    async def describe_files(self, model: str) -> pb.DescribeFilesReply:
        request = pb.DescribeFilesRequest(model=model)
        reply: pb.DescribeFilesReply = await self._call(self._stub.DescribeFiles, request, CALL_S)
        return reply

    async def pull(self, request: pb.PullRequest) -> None:
        await self._call(self._stub.Pull, request, INTRODUCE_S)

    async def drop_model(self, model: str, *, files: bool, staged: bool = False) -> int | None:
        request = pb.DropModelRequest(model=model, files=files, staged=staged)
        reply: pb.DropModelReply = await self._call(self._stub.DropModel, request, 2 * CALL_S)
        return reply.freed_bytes if reply.found else None

    async def confirm(self, proof: str, timeout_s: float) -> bool:
        reply: pb.ConfirmReply = await self._call(self._stub.Confirm, pb.ConfirmRequest(proof=proof), timeout_s)
        return reply.is_mine

    async def read_text_files(self, model: str) -> AsyncIterator[pb.TextFile]:
        request = pb.ReadTextFilesRequest(model=model, takes_image_files=True, takes_later_text_files=True)
        async with aclosing(self._items(self._stub.ReadTextFiles, request, TEXT_FILES_S)) as items:
            async for item in items:
                yield item

    async def commit(self, request: pb.CommitRequest, *, quiet: bool = False) -> AsyncIterator[pb.StageStatus]:
        """Yields reports as long as the stage lives. Without a deadline: the receiver watches the time between
        reports."""
        self._reports += 1
        self._no_report.clear()
        try:
            async with (
                self._quiet_stub() if quiet else nullcontext(self._stub) as stub,
                aclosing(self._items(stub.Commit, request, None, quiet=quiet)) as items,
            ):
                async for item in items:
                    yield item
        finally:
            self._reports -= 1
            if not self._reports:
                self._no_report.set()

    @asynccontextmanager
    async def _quiet_stub(self) -> AsyncIterator[Any]:
        """The calls over a channel of their own, with few pings. It is closed at the end, for the reason of RENEW_S."""
        if self._is_closed:
            raise TransportError(f"the connection to {self.address} is closed")
        channel = open_channel(self.address, self._credentials, [*QUIET, *_DIAL_OPTIONS, *QUIET_REPORTS])
        self._quiet_channels.add(channel)
        try:
            yield LazyStub(rpc.ControlStub, CarefulChannel(channel, self._own_calls))
        finally:
            self._quiet_channels.discard(channel)
            await channel.close()

    def _open(self) -> None:
        self._channel = open_channel(self.address, self._credentials, [*QUIET, *_DIAL_OPTIONS])
        careful = CarefulChannel(self._channel, self._own_calls)
        self._stubs = LazyStub(rpc.ControlStub, careful), LazyStub(paths_pb2_grpc.PathsStub, careful)

    @property
    def _stub(self) -> Any:
        self._renew()
        return self._stubs[0]

    @property
    def _paths(self) -> Any:
        self._renew()
        return self._stubs[1]

    def _renew(self) -> None:
        """Use another channel after a pause; see RENEW_S. `_close_old` closes the old channel."""
        if not self._is_closed and not self._loud_calls and monotonic() - self._last_call_at >= RENEW_S:
            self._old_channels.append(self._channel)
            self._open()
            self._last_call_at = math.inf

    async def _close_old(self) -> None:
        while self._old_channels:
            await self._old_channels.pop().close()

    def _began(self, *, quiet: bool = False) -> None:
        self._calls += 1
        self._loud_calls += not quiet

    def _ended(self, *, quiet: bool = False) -> None:
        self._calls -= 1
        self._loud_calls -= not quiet
        if not quiet:
            self._last_call_at = monotonic()

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        self._began()
        try:
            await self._close_old()
            return _unless_error(await method(request, timeout=timeout_s, metadata=self._metadata))
        except _FAILURES as exc:
            if isinstance(exc, asyncio.CancelledError) and was_cancelled():
                raise  # not from itself: that cycle would keep the call, and so its connection, until a collection
            raise self._translated(exc) from exc
        finally:
            self._ended()

    async def _items(
        self, method: Any, request: Any, timeout_s: float | None, *, quiet: bool = False
    ) -> AsyncGenerator[Any, None]:
        call = None
        self._began(quiet=quiet)
        try:
            await self._close_old()
            call = method(request, timeout=timeout_s, metadata=self._metadata)
            # not `async for`, whose iterator would keep the call, and so its connection, until a collection
            while (item := await call.read()) is not grpc.aio.EOF:
                yield _unless_error(item)
        except _FAILURES as exc:
            if isinstance(exc, asyncio.CancelledError) and was_cancelled():
                raise  # not from itself: that cycle would keep the call, and so its connection, until a collection
            raise self._translated(exc) from exc
        finally:
            self._ended(quiet=quiet)
            if call is not None:
                call.cancel()

    def _translated(self, exc: BaseException) -> MeshError:
        """The MeshError for a failed call."""
        if not isinstance(exc, grpc.aio.AioRpcError):
            return TransportError(f"the connection to {self.address} was closed")
        if self._datagrams is not None and exc.code() in _UNREACHED:
            self._datagrams.call_failed()
        details = printable(exc.details() or "")
        code = dict(exc.trailing_metadata() or ()).get(CODE_KEY)
        if exc.code() == grpc.StatusCode.PERMISSION_DENIED and code != OpenMeshError.code:
            return StrangerError(details)
        if code is not None:
            return error_from_code(printable(str(code), 64), details)
        if exc.code() == grpc.StatusCode.UNIMPLEMENTED:
            return PeerVersionError(f"the peer at {self.address} runs another version of exo-mesh: {details}")
        if exc.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(f"the peer at {self.address} did not answer in time")
        if self._credentials is not None and "handshake failed" in details.lower():
            return StrangerError(f"the node at {self.address} has another secret than this one, or none")
        return TransportError(f"the peer at {self.address} cannot be reached: {details}")


def _unless_error(reply: Any) -> Any:
    if isinstance(reply, TransportError):
        raise reply
    return reply
