"""The port through which a node calls other nodes. The membership knows these protocols and no network library.

`ControlPort` has the calls that the membership makes. `PeerClient` adds the calls that other packages make to a peer.
Both use one connection: the membership keeps a client for each peer, replaces the client when another address works
better, and closes it when the peer is gone.

Two classes implement `PeerClient`. `exo_mesh.wire.control_client.ControlClient` calls over gRPC; a node passes it
to its membership (`exo_mesh/node/node.py`). `tools.simulate.network.SimClient` calls through memory, on a fake clock.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto import paths_pb2


class ControlPort(Protocol):
    """The control endpoint of one peer, at one address.

    A new client does no I/O before its first call. It connects and reconnects by itself.

    Every call fails with a MeshError and nothing else:
    - TransportError: the peer cannot be reached, or the connection was closed during the call.
    - StrangerError, a kind of TransportError: the two nodes have different mesh secrets, if that can be determined.
    - DeadlineError: no answer within `timeout_s`, which includes the time to connect.
    - any other MeshError: the peer's own refusal.
    Cancelling the task of the caller ends the call and raises CancelledError.
    """

    address: str
    """ "host:port"."""

    def at(self, address: str) -> ControlPort:
        """A new client with the same credentials and another address. The caller of `at` closes it."""

    @property
    def is_idle(self) -> bool:
        """True while no call and no stream is running."""

    async def close(self) -> None:
        """Close the connection. Running calls may fail with TransportError. May be called again."""

    async def close_when_idle(self) -> None:
        """Close the connection after the last stream of stage reports has ended, without ending any."""

    async def hello(self, request: pb.HelloRequest, timeout_s: float) -> pb.HelloReply:
        """Introduce this node. The reply says whether the peer admits it, and if not, why."""

    async def probe(self, request: pb.ProbeRequest, timeout_s: float, *, by_call: bool = False) -> pb.ProbeReply:
        """Ask whether the peer is alive; both sides add news. by_call: the answer must show that calls reach the peer,
        so a datagram does not do."""

    async def is_refused(self, timeout_s: float) -> bool:
        """Whether the machine refuses connections at the address, so that no process listens there. False if nothing
        answers; raises no MeshError."""

    async def indirect_probe(self, request: pb.IndirectProbeRequest, timeout_s: float) -> pb.IndirectProbeReply:
        """Ask the peer to probe a third peer."""

    async def exchange(self, request: pb.ExchangeRequest, timeout_s: float) -> pb.ExchangeReply:
        """One call of an anti-entropy round."""

    async def goodbye(self, request: pb.GoodbyeRequest, timeout_s: float) -> None:
        """Notify the peer that this node leaves on purpose."""

    async def confirm(self, proof: str, timeout_s: float) -> bool:
        """Ask the peer whether it makes the call with this proof."""

    async def probe_path(self, reply_bytes: int, timeout_s: float) -> paths_pb2.PathProbeReply:
        """Measure the path to the peer. The reply has the id of the peer and `reply_bytes` bytes, but at most
        domain.addresses.MAX_PROBE_BYTES."""


class PeerClient(ControlPort, Protocol):
    """All calls to one peer. The membership does not make the calls that this class adds.

    They fail like the calls of ControlPort. Each has its own deadline, except calls with `timeout_s`, and `commit`,
    which has none.
    """

    def at(self, address: str) -> PeerClient:
        """See ControlPort.at."""

    async def connects(self, timeout_s: float) -> bool:
        """Whether a process of this mesh accepts connections at the address. Calls nothing and raises no MeshError."""

    async def describe_model(self, model: str, engine: str = "") -> pb.DescribeModelReply:
        """The peer's card of a model. With an engine, also what that engine says about the model."""

    async def self_test(self, request: pb.SelfTestRequest) -> pb.SelfTestReply:
        """Ask an engine of the peer to compute a few layers, to compare the outputs with another engine's."""

    def read_text_files(self, model: str) -> AsyncIterator[pb.TextFile]:
        """The tokenizer and configuration files of a model, in chunks."""

    async def reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        """Ask the peer to reserve memory for a stage. The reply may be a refusal."""

    def commit(self, request: pb.CommitRequest, *, quiet: bool = False) -> AsyncIterator[pb.StageStatus]:
        """Start the reserved stage, or take over a running one, and follow its reports until it ends. quiet: over a
        connection with so few pings that half a minute may pass before its loss is noticed.

        There is no deadline: the receiver watches the time between reports. The client is not idle meanwhile.
        """

    async def link(self, request: pb.LinkRequest) -> None:
        """Send a stage the endpoint of the next one."""

    async def look_at_stage(self, request: pb.LookAtStageRequest) -> pb.LookAtStageReply:
        """Ask for the state of a stage: whether it runs, and the layers that it holds."""

    async def release(self, request: pb.ReleaseRequest) -> None:
        """End a stage and free its reservation."""

    async def introduce(self, model: str, digest: str, *, repo: str = "", revision: str = "") -> None:
        """Ask the peer to get config, tokenizer and headers of a model from its peers if it lacks them; with `repo`,
        from that repository of the hub."""

    async def describe_files(self, model: str) -> pb.DescribeFilesReply:
        """Which bytes of a model the peer has."""

    async def pull(self, request: pb.PullRequest) -> None:
        """Ask the peer to start fetching files of a model."""

    async def drop_model(self, model: str, *, files: bool, staged: bool = False) -> int | None:
        """Ask the peer to stop fetching a model, and to delete what was fetched if `files`; with `staged`, to delete
        the staged copies of all models that nothing uses. Returns the bytes freed, or None if there was nothing to
        drop."""

    async def delete_card(self, model: str) -> bool:
        """Delete the custom model card that the peer has of a model. False if it has none."""

    async def delete_instance(self, fence: pb.Fence, *, is_replaced: bool = False) -> bool:
        """Send the peer a deletion; it ends the instance if it owns it. False if it owns no instance with this id.
        is_replaced: see Instances.delete."""

    async def keep_instance(self, instance_id: str, idle_s: float) -> bool:
        """Set how long an instance that the peer owns may be idle; negative: for ever. False if it owns no instance
        with this id."""

    async def stop_node(self, node_id: str, *, restart: bool) -> None:
        """Stop or restart the peer; returns once it has acknowledged. MeshError if the peer is not `node_id`."""

    async def wake(self, request: pb.WakeRequest, timeout_s: float) -> int:
        """Ask the peer to send Wake-on-LAN packets for another machine. Returns the number of networks in which it
        did."""

    async def drain(self, node_id: str, *, on: bool) -> None:
        """Ask the peer to accept no new work, or to accept requests again. MeshError if the peer is not `node_id`."""

    async def read_log(self, records: int) -> bytes:
        """The last log records of the peer, as JSON."""

    async def cancel(self, request_id: str, key_id: str | None = None) -> bool:
        """Cancel a request that entered the mesh at the peer. False if the peer does not know the request, or if it
        came with an API key other than key_id; None matches any key."""

    async def cancel_on(self, instance_id: str, request_id: str = "") -> int:
        """Cancel the requests that entered at the peer and run on an instance, or only the request `request_id`.
        Returns the number of cancelled requests."""

    async def find_streams(self, request: pb.FindStreamsRequest) -> pb.FindStreamsReply:
        """The streams that run for clients of the peer and that the viewer may see."""

    def follow_stream(self, request: pb.FollowStreamRequest) -> AsyncGenerator[pb.FollowReply, None]:
        """The events of one stream, until it ends."""

    def read_kept(self, request: pb.ReadKeptRequest) -> AsyncGenerator[pb.KeptPart, None]:
        """An answer that the peer keeps, and those before it in its conversation."""

    async def delete_kept(self, request: pb.DeleteKeptRequest) -> bool:
        """Delete an answer that the peer keeps. False if it has none with this id that the caller may read."""

    async def diagnose(self, request: pb.DiagnoseRequest, timeout_s: float) -> pb.DiagnoseReply:
        """The peer's diagnostics."""

    async def read_traces(self, request: pb.ReadTracesRequest, timeout_s: float) -> pb.ReadTracesReply:
        """Traced requests that entered at the peer."""

    async def delete_traces(self, request: pb.DeleteTracesRequest, timeout_s: float) -> int:
        """Delete traces that the peer keeps; returns their number."""

    async def capture(self, runner: str, timeout_s: float) -> pb.CaptureReply:
        """Stacks and memory maps of the peer and its runners, or of one runner."""

    async def share_keys(self, request: pb.ShareKeysRequest, timeout_s: float) -> pb.ShareKeysReply:
        """Send the peer API keys, or ask for the keys that it holds."""
