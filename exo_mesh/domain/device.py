"""A peer's identity, its devices, and its current load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from exo_mesh.base.versions import ProtocolRange
from exo_mesh.domain.addresses import MAX_MACS, valid_macs
from exo_mesh.domain.engine_speed import DIGEST_CHARS, MAX_MODELS, ModelSpeeds
from exo_mesh.domain.fields import Absent, Cut, Else, FirstBytes, SentAs, Size, Tidied
from exo_mesh.domain.health import MAX_REASONS, Reason
from exo_mesh.domain.power import NO_HARDWARE, HardwareReading
from exo_mesh.domain.shard import KeptLayers, KeptOfModel
from exo_mesh.domain.whole.served import MAX_SERVED, ServedModel

DTYPE_TAGS: Mapping[str, str] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
ACTIVATION_FORMAT = "act:v1"
"""The tag of a peer whose engines pass activations on as raw little-endian rows, which another engine can read."""

MAX_ITEMS = 1024
"""Most addresses, models or engines of one peer; the rest is cut off, so that one peer cannot fill the others'
memory."""

MAX_REASON = 256  # characters

MAX_HOPS = 16

MAX_NAMES_BYTES = 64 * 1024
"""Most bytes of model names that one peer publishes, so that its hello stays below the limit for strangers."""

MAX_ENGINES = 32
"""Most engines of one peer with details beyond their names, and most dtypes of one engine."""

MAX_PORTS = 32
"""Most Thunderbolt ports of one peer; a Mac Studio has six."""

ModelNames = Annotated[tuple[str, ...], Cut(MAX_ITEMS), FirstBytes(MAX_NAMES_BYTES)]
Word = Annotated[str, Cut(64)]

FULL, API, EDGE = "full", "api", "edge"

ROLES = (FULL, API, EDGE)
"""full: the peer serves requests and holds layers. api: it serves requests and relays, and never holds layers. edge: it
holds layers only of models that the other peers cannot hold without it, such as a laptop that comes and goes."""

FETCHES = ("", "peers", "hub")
"""Sources from which a peer fetches missing model files: none, other peers only, or other peers and the hub."""


def role_of(role: str, max_memory_bytes: int | None) -> str:
    """The role that follows from the settings: a peer that gives models no memory holds no layers."""
    return API if max_memory_bytes == 0 else role


def why_no_layers(role: str, max_memory_bytes: int | None) -> str:
    """Explains why a peer with these settings holds no layers; "" if it may hold some."""
    if role == API:
        return "--role is api"
    return "--max-memory is 0" if max_memory_bytes == 0 else ""


class EngineInfo(msgspec.Struct, frozen=True):
    """An engine that can run on a peer. compute: the hardware that it uses. dtypes: of activations that it accepts."""

    name: Word
    compute: Annotated[str, Cut(32)]
    version: Annotated[str, Cut(128)] = ""
    dtypes: Annotated[tuple[str, ...], Cut(MAX_ENGINES)] = ()

    @property
    def tag(self) -> str:
        """The capability tag, such as `mlx-metal`."""
        return f"{self.name}-{self.compute}"

    @property
    def build(self) -> str:
        """Identifies how the engine computes: two peers with equal builds give equal, or nearly equal, results."""
        return f"{self.tag} {self.version}".strip()


class Device(msgspec.Struct, frozen=True):
    """The hardware that a peer computes on. `engines` can run here; `engine` is used unless a request names another.

    details: more about those engines. memory_bytes: all memory that the device of `engine` has. why: explains which
    part of it models may use. A peer of an older version reports none of these.
    """

    kind: str
    name: str
    engines: Annotated[tuple[str, ...], Cut(MAX_ITEMS)]
    engine: str
    cores: int = 0
    details: Annotated[tuple[EngineInfo, ...], Cut(MAX_ENGINES)] = ()
    memory_bytes: int = 0
    why: Annotated[str, Cut(MAX_REASON)] = ""


class RdmaPort(msgspec.Struct, frozen=True):
    """A Thunderbolt port over which a Mac could do RDMA.

    device: such as "rdma_en5"; "" if macOS shows none for the port. active: as `ibv_devinfo` reports it. uuid,
    other_uuid: of the Thunderbolt domains at both ends of the cable; other_uuid is "" if there is no Mac at the other
    end. max_queue_pairs: how many the device supports at once, 0 if macOS does not say. bridged: the machine has a
    Thunderbolt Bridge, which passes packets from one port to the others.
    """

    device: Word
    active: bool
    uuid: Word
    other_uuid: Word = ""
    speed: Word = ""
    max_queue_pairs: int = 0
    bridged: bool = False


class StaticRank(msgspec.Struct, frozen=True):
    """The rank that a hostfile, or `mlx.launch`, assigns to a peer in a tensor group.

    group: a digest that all ranks of the group share. rdma: the device by which this rank reaches each rank, None if
    there is none.
    """

    group: Word
    rank: int
    size: int
    backend: Annotated[str, Cut(16)]
    rdma: Annotated[tuple[Annotated[str | None, Cut(64)], ...], Cut(MAX_PORTS)] = ()


def _valid_port(port: int) -> int:
    return port if port < 65_536 else 0


class PeerInfo(msgspec.Struct, frozen=True):
    """What a peer reports about itself. `incarnation` rises with every start of the same id.

    addresses: "host:port" of its control endpoint, as the peer sees itself. models: names of the models that are
    complete on its disk. partial_models: models of which it has config, tokenizer and headers, but not all weights.
    model_engines: for each model of both kinds, the engines here that run its architecture and say that they read its
    quantisation, the preferred one first; a peer of an older version does not say. fetches: from where it gets model
    files, see FETCHES. files_port: where other peers read its files, 0 if they cannot. has_store: the peer hosts the
    model store. protocol: the oldest protocol version that it speaks; newest_protocol: the newest, 0 if it speaks only
    the one. macs: of its network cards. role: one of ROLES; "full" from a peer of an older version. served: what the
    model servers beside it serve. engine_speeds: how fast its engines run some models, where it has measured them.
    on_disk: by model digest (its first DIGEST_CHARS characters), the layers of which it has KV, or the weights although
    it has not all files. unverified: models that it has parts of and may run, but has not yet compared with the digests
    of the files.
    """

    id: Annotated[str, Size(64, least=1)]
    incarnation: int
    name: Annotated[str, Cut(256)]
    version: Word
    protocol: int
    namespace: str
    addresses: Annotated[tuple[str, ...], Cut(MAX_ITEMS)]
    api_url: str = ""
    devices: Annotated[tuple[Device, ...], Cut(MAX_ITEMS)] = ()
    models: ModelNames = ()
    model_engines: Annotated[
        tuple[tuple[str, Annotated[tuple[str, ...], Cut(MAX_ENGINES)]], ...],
        Cut(MAX_ITEMS),
        FirstBytes(MAX_NAMES_BYTES),
    ] = ()
    rdma_ports: Annotated[tuple[RdmaPort, ...], Cut(MAX_PORTS)] = ()
    static_rank: StaticRank | None = None
    fetches: Annotated[str, Else("", FETCHES)] = ""
    files_port: Annotated[int, Tidied(_valid_port)] = 0
    partial_models: ModelNames = ()
    has_store: bool = False
    newest_protocol: int = 0
    macs: Annotated[tuple[str, ...], Cut(MAX_MACS), Tidied(valid_macs)] = ()
    role: Annotated[str, Else(FULL, ROLES), Absent(FULL)] = FULL
    served: Annotated[tuple[ServedModel, ...], Cut(MAX_SERVED)] = ()
    engine_speeds: ModelSpeeds = ()
    on_disk: Annotated[tuple[KeptOfModel, ...], Cut(MAX_MODELS)] = ()
    unverified: ModelNames = ()

    @property
    def protocols(self) -> ProtocolRange:
        """The protocol versions that the peer speaks."""
        return ProtocolRange.said(self.protocol, self.newest_protocol)

    def serves(self, model: str) -> ServedModel | None:
        """The model of this name that a model server beside the peer serves; None if there is none."""
        return next((one for one in self.served if one.name == model), None)

    def kept_of(self, digest: str) -> tuple[KeptLayers, ...]:
        """What the peer has on its disk of some layers of a model."""
        return next((kept for key, kept in self.on_disk if key == digest[:DIGEST_CHARS]), ())

    def knows(self, model: str) -> bool:
        """Whether the peer has at least config, tokenizer and headers of a model."""
        return model in self.models or model in self.partial_models

    @property
    def engines(self) -> tuple[str, ...]:
        """Every engine that runs on some device of the peer, the default one first."""
        names = [device.engine for device in self.devices if device.engine]
        names += [engine for device in self.devices for engine in device.engines]
        names += [one.engine for one in self.served]
        return tuple(dict.fromkeys(names))

    @property
    def tags(self) -> tuple[str, ...]:
        """The peer's capabilities: `<engine>` and `<engine>-<compute>` of each engine, `act:v1`, `dtype:…` it
        accepts."""
        details = [engine for device in self.devices for engine in device.details]
        tags = [*self.engines, *(engine.tag for engine in details)]
        dtypes = {dtype for engine in details for dtype in engine.dtypes}
        tags += [ACTIVATION_FORMAT] if dtypes else []
        tags += [f"dtype:{tag}" for dtype, tag in DTYPE_TAGS.items() if dtype in dtypes]
        return tuple(dict.fromkeys(tags))

    def engines_for(self, model: str) -> tuple[str, ...]:
        """The engines with which the peer would run a model, the first choice first.

        A peer that does not say, or that has no engine for the model, gives its device's engine: asked to reserve, it
        explains the refusal.
        """
        if (served := self.serves(model)) is not None:
            return (served.engine,)
        for name, engines in self.model_engines:
            if name == model and engines:
                return engines
        return tuple(device.engine for device in self.devices[:1] if device.engine)

    def engine_info(self, engine: str) -> EngineInfo | None:
        """What the peer reports about one of its engines; None if it does not have the engine."""
        return next((info for device in self.devices for info in device.details if info.name == engine), None)


class HopReading(msgspec.Struct, frozen=True):
    """The path to another peer, as the reporting peer measured it; 0: not measured. mb_per_s: 10^6 bytes."""

    peer_id: Word
    rtt_ms: float = 0.0
    mb_per_s: float = 0.0
    kind: Annotated[str, Cut(16)] = ""


Counts = Annotated[Mapping[str, int], Cut(MAX_ITEMS)]


class EntryRequests(msgspec.Struct, frozen=True):
    """The requests of a peer's clients. running: by instance; awaited: instances for whose recovery a request waits."""

    running: Counts = msgspec.field(default_factory=dict)
    awaited: Annotated[frozenset[str], Cut(MAX_ITEMS)] = frozenset()


class Telemetry(msgspec.Struct, frozen=True):
    """The current figures of one peer; a higher `sequence` is newer. Never part of the agreed view.

    usable_bytes: what a new reservation could get now; reserved_bytes: what plans hold already. s_per_gb: by engine,
    the time of a decode step per 1e9 bytes of weights, where measured. tokens: drawn so far, by instance whose driver
    runs there; outstanding: requests that wait or run there. reasons: the problems that the peer reports about itself.
    keys_digest: of the API keys that it holds; 0 in an open mesh. fetch_room_bytes: how many bytes of model files it
    could fetch now. capacity_bytes: what models could use if nothing else ran there; 0 from a peer of an older version.
    headroom_bytes: the memory that can still be used before memory becomes critical, after everything that is being
    loaded; None from a peer of an older version. temperature_c, power_w: 0 where they are unknown. frames: computed so
    far, by instance whose driver runs there. is_draining: the peer accepts no new work. hops: its paths to peers with
    which it shares a ring. hardware: power, temperature and utilization of its machine and accelerators. prompt_tokens:
    computed so far, by instance whose driver runs there. entry_requests: None from a peer of an older version. waiting:
    requests in the queue, by instance whose driver runs there; slots: requests that it runs at once.
    """

    peer_id: str
    sequence: int
    usable_bytes: int
    total_bytes: int
    reserved_bytes: int
    load: float = 0.0
    s_per_gb: Annotated[Mapping[str, float], Cut(MAX_ITEMS)] = msgspec.field(default_factory=dict)
    tokens: Counts = msgspec.field(default_factory=dict)
    outstanding: Counts = msgspec.field(default_factory=dict)
    reasons: Annotated[tuple[Reason, ...], Cut(MAX_REASONS)] = ()
    keys_digest: int = 0
    fetch_room_bytes: int = 0
    capacity_bytes: int = 0
    headroom_bytes: int | None = None
    temperature_c: float = 0.0
    power_w: float = 0.0
    frames: Counts = msgspec.field(default_factory=dict)
    is_draining: Annotated[bool, SentAs("draining")] = False
    hops: Annotated[tuple[HopReading, ...], Cut(MAX_HOPS)] = ()
    hardware: Annotated[HardwareReading, Absent(NO_HARDWARE)] = NO_HARDWARE
    prompt_tokens: Counts = msgspec.field(default_factory=dict)
    entry_requests: EntryRequests | None = None
    waiting: Counts = msgspec.field(default_factory=dict)
    slots: Counts = msgspec.field(default_factory=dict)
