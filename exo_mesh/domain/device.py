"""Who a peer is, what it computes on, and how loaded it is just now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Device:
    """What a peer computes on. `engines` can run here; `engine` is the one it uses unless asked otherwise."""

    kind: str
    name: str
    engines: tuple[str, ...]
    engine: str
    cores: int = 0


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What a peer says of itself. `incarnation` rises with every start of the same id.

    addresses: "host:port" of its control endpoint, as it sees itself. models: names of models on its disk.
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

    @property
    def engines(self) -> tuple[str, ...]:
        """Every engine that runs on some device of the peer, the default one first."""
        names = [device.engine for device in self.devices if device.engine]
        names += [engine for device in self.devices for engine in device.engines]
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A volatile reading of one peer; a higher `sequence` is newer. Never part of the agreed view.

    usable_bytes is what a new reservation could get now; reserved_bytes is what plans hold already. s_per_gb: by
    engine, what a decode step takes per 1e9 bytes of weights, where measured. tokens: drawn so far, by instance whose
    driver runs there.
    """

    peer_id: str
    sequence: int
    usable_bytes: int
    total_bytes: int
    reserved_bytes: int
    load: float = 0.0
    s_per_gb: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
