"""Who a peer is, what it computes on, and how loaded it is just now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exo_mesh.domain.health import Reason
from exo_mesh.domain.power.readings import NO_HARDWARE, HardwareReading
from exo_mesh.protocol import ProtocolRange

DTYPE_TAGS: Mapping[str, str] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
ACTIVATION_FORMAT = "act:v1"
"""The tag of a peer whose engines hand on activations as raw little-endian rows, so that another engine can go on."""


FETCHES = ("", "peers", "hub")
"""From where a peer gets files of models that it does not have: from nowhere, from peers only, or also from the hub."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine that can run on a peer. compute: what it computes on there. dtypes: of activations that it takes."""

    name: str
    compute: str
    version: str = ""
    dtypes: tuple[str, ...] = ()

    @property
    def tag(self) -> str:
        """The capability tag, such as `mlx-metal`."""
        return f"{self.name}-{self.compute}"

    @property
    def build(self) -> str:
        """What decides how it computes: two peers of equal builds give equal results, or nearly."""
        return f"{self.tag} {self.version}".strip()


@dataclass(frozen=True, slots=True)
class Device:
    """What a peer computes on. `engines` can run here; `engine` is the one it uses unless asked otherwise.

    details: more about those engines. memory_bytes: all that the device of `engine` has; why: which part of it models
    may take. A peer of an older version says none of these.
    """

    kind: str
    name: str
    engines: tuple[str, ...]
    engine: str
    cores: int = 0
    details: tuple[EngineInfo, ...] = ()
    memory_bytes: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A Thunderbolt port over which a Mac could do RDMA.

    device: such as "rdma_en5"; "" if macOS shows none for it. active: as `ibv_devinfo` has it. uuid, other_uuid: of the
    Thunderbolt domains at both ends of the cable; other_uuid is "" if there is no Mac at the other end.
    max_queue_pairs: how many the device can have at once, 0 if macOS does not say. bridged: the machine has a
    Thunderbolt Bridge, which passes packets from one port to the others.
    """

    device: str
    active: bool
    uuid: str
    other_uuid: str = ""
    speed: str = ""
    max_queue_pairs: int = 0
    bridged: bool = False


@dataclass(frozen=True, slots=True)
class StaticRank:
    """The rank that a hostfile, or `mlx.launch`, gives a peer in a tensor group.

    group: a digest that all its ranks share. rdma: the device by which it reaches each rank, None where there is none.
    """

    group: str
    rank: int
    size: int
    backend: str
    rdma: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What a peer says of itself. `incarnation` rises with every start of the same id.

    addresses: "host:port" of its control endpoint, as it sees itself. models: names of models that are whole on its
    disk. partial_models: of those of which it has config, tokenizer and headers, but not all weights. model_engines:
    for each model of both, the engines here that run its architecture, the one it would use first; a peer of an older
    version does not say. fetches: from where it gets files of models, see FETCHES. files_port: where other peers read
    its files, 0 if they cannot. has_store: it is the host of the model store. protocol: the oldest version of the
    protocol that it speaks; newest_protocol: the newest, 0 if it speaks only the one. macs: of its network cards.
    """

    id: str
    incarnation: int
    name: str
    version: str
    protocol: int
    namespace: str
    addresses: tuple[str, ...]
    api_url: str = ""
    devices: tuple[Device, ...] = ()
    models: tuple[str, ...] = ()
    model_engines: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rdma_ports: tuple[RdmaPort, ...] = ()
    static_rank: StaticRank | None = None
    fetches: str = ""
    files_port: int = 0
    partial_models: tuple[str, ...] = ()
    has_store: bool = False
    newest_protocol: int = 0
    macs: tuple[str, ...] = ()

    @property
    def protocols(self) -> ProtocolRange:
        """The versions of the protocol that it speaks."""
        return ProtocolRange.said(self.protocol, self.newest_protocol)

    def knows(self, model: str) -> bool:
        """Whether the peer has at least config, tokenizer and headers of a model."""
        return model in self.models or model in self.partial_models

    @property
    def engines(self) -> tuple[str, ...]:
        """Every engine that runs on some device of the peer, the default one first."""
        names = [device.engine for device in self.devices if device.engine]
        names += [engine for device in self.devices for engine in device.engines]
        return tuple(dict.fromkeys(names))

    @property
    def tags(self) -> tuple[str, ...]:
        """What it can do: `<engine>` and `<engine>-<compute>` of each engine, `act:v1`, `dtype:…` of activations."""
        details = [engine for device in self.devices for engine in device.details]
        tags = [*self.engines, *(engine.tag for engine in details)]
        dtypes = {dtype for engine in details for dtype in engine.dtypes}
        tags += [ACTIVATION_FORMAT] if dtypes else []
        tags += [f"dtype:{tag}" for dtype, tag in DTYPE_TAGS.items() if dtype in dtypes]
        return tuple(dict.fromkeys(tags))

    def engines_for(self, model: str) -> tuple[str, ...]:
        """Engines that it would run a model with, the first choice first.

        Of a peer that does not say, or that has none for it, the one of its device: asked to reserve, it says why not.
        """
        for name, engines in self.model_engines:
            if name == model and engines:
                return engines
        return tuple(device.engine for device in self.devices[:1] if device.engine)

    def engine_info(self, engine: str) -> EngineInfo | None:
        """What the peer says of one of its engines."""
        return next((info for device in self.devices for info in device.details if info.name == engine), None)


@dataclass(frozen=True, slots=True)
class HopReading:
    """A way to another peer, as the peer that gives the reading measured it; 0: not measured. mb_per_s: 10^6 bytes."""

    peer_id: str
    rtt_ms: float = 0.0
    mb_per_s: float = 0.0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A volatile reading of one peer; a higher `sequence` is newer. Never part of the agreed view.

    usable_bytes is what a new reservation could get now; reserved_bytes is what plans hold already. s_per_gb: by
    engine, what a decode step takes per 1e9 bytes of weights, where measured. tokens: drawn so far, by instance whose
    driver runs there; outstanding: requests that wait or run there. reasons: what the peer says is wrong with it.
    keys_digest: of the API keys that it holds; 0 in an open mesh. fetch_room_bytes: files of models that it could fetch
    now. capacity_bytes: what models could take if nothing else ran there; 0 of a peer of an older version.
    headroom_bytes: what could be taken of its memory before that is critical, after what is being loaded; None of a
    peer of an older version. temperature_c, power_w: 0 where they are unknown. frames: computed so far, by instance
    whose driver runs there. is_draining: it takes nothing new. hops: its ways to peers with which it shares a ring.
    hardware: what its machine and its accelerators draw, how hot and how busy they are. prompt_tokens: computed so far,
    by instance whose driver runs there.
    """

    peer_id: str
    sequence: int
    usable_bytes: int
    total_bytes: int
    reserved_bytes: int
    load: float = 0.0
    s_per_gb: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    outstanding: Mapping[str, int] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    keys_digest: int = 0
    fetch_room_bytes: int = 0
    capacity_bytes: int = 0
    headroom_bytes: int | None = None
    temperature_c: float = 0.0
    power_w: float = 0.0
    frames: Mapping[str, int] = field(default_factory=dict)
    is_draining: bool = False
    hops: tuple[HopReading, ...] = ()
    hardware: HardwareReading = NO_HARDWARE
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
