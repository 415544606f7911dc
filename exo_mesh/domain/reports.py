"""The replies of `GET /state`, `/health` and `/v1/topology`, as the API, the page and the command line share them.

A field that a later version adds has a default, so that the command line can read replies of older nodes. A field with
the default UNSET is absent where it does not apply; None means that a value is not known.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from exo_mesh.domain.device import RdmaPort, StaticRank
from exo_mesh.domain.download import DownloadState
from exo_mesh.domain.fast_synch import FastSynch
from exo_mesh.domain.health import HealthLevel
from exo_mesh.domain.view import InstanceState
from exo_mesh.domain.whole.served import ServedModel

_Report = TypeVar("_Report", bound=msgspec.Struct)


def report_from(source: object, kind: type[_Report], **others: Any) -> _Report:
    """A report whose fields have the values of the source's attributes of the same names. others: further fields."""
    same = {name: getattr(source, name) for name in kind.__struct_fields__ if name not in others}
    return kind(**same, **others)


class DeviceReport(msgspec.Struct):
    """What a peer computes on."""

    kind: str
    name: str
    engines: tuple[str, ...]
    engine: str
    cores: int
    memory_bytes: int
    why: str


class PeerReport(msgspec.Struct):
    """A peer of the view."""

    id: str
    name: str
    role: str
    alive: bool
    incarnation: int
    version: str
    addresses: tuple[str, ...]
    api_url: str
    devices: list[DeviceReport]
    tags: tuple[str, ...]
    engine_versions: dict[str, str]
    models: tuple[str, ...]
    partial_models: tuple[str, ...]
    unverified: tuple[str, ...]
    fetches: str
    model_engines: dict[str, tuple[str, ...]]
    rdma_ports: tuple[RdmaPort, ...]
    served: tuple[ServedModel, ...]
    static_rank: StaticRank | None


class DownloadReport(msgspec.Struct, kw_only=True):
    """A download of one peer. model: absent in a stage, whose instance names it."""

    model: str | UnsetType = UNSET
    peer: str
    state: DownloadState
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    eta_s: float
    reason: str


class GroupReport(msgspec.Struct):
    """The tensor group of a stage. rdma: the device by which each rank reaches each other one."""

    backend: str
    peers: tuple[str, ...]
    rdma: tuple[tuple[str | None, ...], ...]


class InstanceStage(msgspec.Struct, kw_only=True):
    """A stage of an instance. layers: [start, stop). group: of a tensor group. downloads: while the instance loads."""

    peer: str
    engine: str
    layers: tuple[int, int]
    reserve_bytes: int
    group: GroupReport | UnsetType = UNSET
    endpoint: str | None
    pid: int | None
    downloads: list[DownloadReport] | UnsetType = UNSET
    phase: str | UnsetType = UNSET
    progress: str | UnsetType = UNSET

    @property
    def peers(self) -> tuple[str, ...]:
        """The ids of all peers of the stage."""
        return self.group.peers if self.group else (self.peer,)


class InstanceReport(msgspec.Struct):
    """An instance of the view. ballot: (counter, proposer)."""

    id: str
    model: str
    model_digest: str
    state: InstanceState
    reason: str
    automatic: bool
    owner: str
    ballot: tuple[int, str]
    digest: str
    context_limit: int
    kv_pool_tokens: int
    policy: str
    activation_dtype: str
    stages: list[InstanceStage]


class ViewReport(msgspec.Struct):
    """The shared view, which is equal on all live peers. Its digest does not cover downloads."""

    peers: list[PeerReport]
    instances: list[InstanceReport]
    downloads: list[DownloadReport]
    view_digest: str


class DeviceReading(msgspec.Struct, kw_only=True):
    """Power, temperature and utilization of a machine or an accelerator; unknown values are absent. id, kind, vendor,
    name: of an accelerator. sources: by name of the value."""

    id: str | UnsetType = UNSET
    kind: str | UnsetType = UNSET
    vendor: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    utilization: float | UnsetType = UNSET
    power_w: float | UnsetType = UNSET
    temperature_c: float | UnsetType = UNSET
    memory_used_bytes: int | UnsetType = UNSET
    memory_total_bytes: int | UnsetType = UNSET
    mapped_used_bytes: int | UnsetType = UNSET
    mapped_total_bytes: int | UnsetType = UNSET
    clock_hz: float | UnsetType = UNSET
    energy_j: float | UnsetType = UNSET
    sources: dict[str, str]


class HardwareReport(msgspec.Struct):
    """The readings of one machine."""

    machine: DeviceReading
    accelerators: list[DeviceReading]


class HopReport(msgspec.Struct):
    """The path from a peer to another one. mb_per_s: 10^6 bytes per second."""

    to: str
    rtt_ms: float | None
    mb_per_s: float | None
    kind: str


class TelemetryReport(msgspec.Struct):
    """The current figures of one peer; `domain.device.Telemetry` explains them."""

    usable_bytes: int
    total_bytes: int
    reserved_bytes: int
    headroom_bytes: int | None
    load: float
    s_per_gb: dict[str, float]
    tokens: dict[str, int]
    fetch_room_bytes: int
    temperature_c: float | None
    power_w: float | None
    hardware: HardwareReport
    frames: dict[str, int]
    draining: bool
    hops: list[HopReport]


class LinkPath(msgspec.Struct, kw_only=True):
    """One address of a peer, with its measurements. mb_per_s_at: Unix seconds; absent in the report of another peer."""

    address: str
    kind: str
    rtt_ms: float | None
    mb_per_s: float | None
    mb_per_s_at: float | UnsetType | None = UNSET
    works: bool


class LinkReport(msgspec.Struct, kw_only=True):
    """The link between two peers. rtt_ms: measured for the address in use; until then, of the last exchanges. mb_per_s:
    10^6 bytes per second, of one transfer of 256 KiB at the time mb_per_s_at (Unix seconds). A link between other peers
    has no addresses and no mb_per_s_at."""

    source: str = msgspec.field(name="from")
    to: str
    address: str
    rtt_ms: float | None
    mb_per_s: float | None
    mb_per_s_at: float | UnsetType | None = UNSET
    paths: list[LinkPath]


class CableEnd(msgspec.Struct):
    """One end of a Thunderbolt cable."""

    peer: str
    device: str
    active: bool


class CableReport(msgspec.Struct):
    """A Thunderbolt cable between two peers. up: both ends have an active RDMA port."""

    ends: list[CableEnd]
    up: bool
    speed: str
    transport: str


class StageCounters(msgspec.Struct):
    """The counters of a stage on the node that answers."""

    frames_in: int
    frames_out: int
    bytes_out: int
    sequences: int
    memory_bytes: int
    queued: int
    running: int
    tokens: int
    linked: bool
    busy_s: float
    laps: int
    lap_p50_s: float
    lap_p99_s: float


class ReasonReport(msgspec.Struct):
    """One problem or note. Callers who may not call the API see only its code and level."""

    code: str
    level: HealthLevel
    message: str | UnsetType = UNSET
    remedy: str | UnsetType = UNSET


class PeerHealth(msgspec.Struct):
    """The health of one peer."""

    id: str
    name: str
    level: HealthLevel
    reasons: list[ReasonReport]


class InstanceHealth(msgspec.Struct):
    """The health of one instance."""

    id: str
    level: HealthLevel
    reasons: list[ReasonReport]


class HealthReport(msgspec.Struct, kw_only=True):
    """The health of a node. status: "starting", "waiting_for_peers", "ok", "degraded", "draining" or "stopping". peers:
    how many are seen, this one included. Callers who may not call the API do not see that of peers and instances."""

    status: str
    level: HealthLevel
    reasons: list[ReasonReport]
    peers: int
    mesh: str
    peer_health: list[PeerHealth] | UnsetType = UNSET
    instance_health: list[InstanceHealth] | UnsetType = UNSET


class DriverQueue(msgspec.Struct):
    """The queue of one driver on the node that answers."""

    instance: str
    waiting: int
    running: int
    tokens: int


class QueueReport(msgspec.Struct):
    """The queues of the drivers on the node that answers. entered: requests that entered there, wherever they run."""

    depth: int
    max: int
    waiting: int
    in_progress: int
    entered: int
    instances: list[DriverQueue] | UnsetType = UNSET


class RunnerReport(msgspec.Struct):
    """What the runners here do. runner_status: "none" without a stage here, "loading", "idle", "busy" while a stage
    holds a sequence, "failed" if nothing runs here and an instance with a stage here failed, or "shutting_down" while
    the node stops."""

    runner_mode: str
    runner_status: str


class NodeHealth(HealthReport, kw_only=True):
    """The reply of GET /health."""

    runner_mode: str
    runner_status: str
    queue: QueueReport
    version: str
    node_id: str | UnsetType = UNSET


class Readiness(msgspec.Struct):
    """The reply of GET /readyz."""

    ready: bool
    status: str
    reasons: list[ReasonReport]


class StateReport(msgspec.Struct):
    """The reply of GET /state: the shared view, the telemetry by peer, and what the node that answers knows.
    requests_here: how many live requests are in which state. stages_here: by instance."""

    node_id: str
    view: ViewReport
    telemetry: dict[str, TelemetryReport]
    links: list[LinkReport]
    cables: list[CableReport]
    fast_synch: FastSynch
    runner: RunnerReport
    requests_here: dict[str, int]
    stages_here: dict[str, StageCounters]
    health: HealthReport


class MeshCapacity(msgspec.Struct):
    """The sum of the peers' last reports."""

    peers: int
    total_bytes: int
    usable_bytes: int
    reserved_bytes: int


class TopologyPeer(msgspec.Struct):
    """A peer of the topology."""

    id: str
    name: str
    role: str
    tags: tuple[str, ...]
    devices: list[DeviceReport]


class RingHop(msgspec.Struct):
    """A stage of a ring. layers: [start, stop)."""

    peer: str
    peers: tuple[str, ...]
    layers: tuple[int, int]
    engine: str


class RingReport(msgspec.Struct):
    """The ring of an instance."""

    instance: str
    model: str
    state: InstanceState
    hops: list[RingHop]


class TopologyReport(msgspec.Struct):
    """The reply of GET /v1/topology. view_digest: equal at all peers that agree. refused: peers, with the reason."""

    node_id: str
    view_digest: str
    capacity: MeshCapacity
    peers: list[TopologyPeer]
    links: list[LinkReport]
    cables: list[CableReport]
    refused: list[str]
    rings: list[RingReport]
