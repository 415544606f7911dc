"""The structs of the bodies of the instance routes."""

from __future__ import annotations

from typing import Literal

import msgspec


class GroupBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The tensor group of a stage, as previews and /state show it, with the leader first. `rdma` is accepted and
    computed again from the cables."""

    peers: list[str]
    backend: Literal["auto", "ring", "jaccl", "jaccl-ring"] = "auto"
    rdma: list[list[str | None]] = []


class StageBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A stage, as `GET /instance/previews` shows it. Only peer, layers, engine, reserve_bytes (the sum of weights, KV
    and overhead) and group are used. The other figures are accepted so that a preview can be sent back unchanged."""

    peer: str
    layers: tuple[int, int]
    engine: str | None = None
    reserve_bytes: int | None = None
    group: GroupBody | None = None
    name: str | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    overhead_bytes: int | None = None
    usable_bytes: int | None = None
    headroom_bytes: int | None = None


class InstanceBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /instance."""

    model: str
    min_peers: int | None = None
    policy: Literal["memory", "latency", "throughput"] | None = None
    context_limit: int | None = None
    engine: str | None = None
    engine_preference: list[str] = []
    mixed_rings: Literal["auto", "never", "always"] | None = None
    tensor_group: int | None = None
    groups: list[list[str]] = []
    group_backend: Literal["auto", "ring", "jaccl", "jaccl-ring"] | None = None
    exclude_peers: list[str] = []
    replicas: int | None = None
    pins: dict[str, tuple[int, int]] | None = None
    stages: list[StageBody] | None = None
