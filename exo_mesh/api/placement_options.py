"""The placement options of `POST /instance` and `GET /instance/previews`: the body, and what it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, cast, get_args

import msgspec
from msgspec.structs import replace
from multidict import MultiDict, MultiMapping

from exo_mesh.api.errors import quoted
from exo_mesh.domain.grouping import WishedBackend
from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.ring_candidates import MIXING
from exo_mesh.domain.wiring_rules import MAX_MESH_RANKS
from exo_mesh.errors import InputError, MeshError, PlacementError
from exo_mesh.rings.placing.spec import InstanceSpec

MAX_PREFERENCES = 16
MAX_REPLICAS = 64
MAX_GROUPS = 16
"""Most tensor groups that one request may name."""

_BACKENDS: tuple[str, ...] = get_args(WishedBackend)
_QUERY = frozenset(
    {
        "model", "engine", "context_limit", "exclude_peers", "engine_preference", "mixed_rings", "tensor_group",
        "groups", "group_backend",
    }
)  # fmt: skip


_OTHER_NAMES = {"model_id": "model", "excluded_nodes": "exclude_peers"}
"""Parameter names of older programs, and the current names."""


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


@contextmanager
def errors_name(fields: Mapping[str, str]) -> Iterator[None]:
    """Errors that leave this block name fields as the client does. fields: our name of each field, and the client's."""
    try:
        yield
    except MeshError as error:

        def renamed(text: str) -> str:
            for ours, theirs in fields.items():
                # the word "model" is the name of a field only where a sentence is about its value
                text = re.sub(ours if "_" in ours else f"^{ours}(?=:| is )", theirs, text)
            return text

        error.args = (renamed(str(error)),)
        if isinstance(error, InputError) and error.param is not None:
            error.param = fields.get(error.param, error.param)
        if isinstance(error, PlacementError):
            error.remedy = renamed(error.remedy)
        raise


def names_of_query(query: Mapping[str, str]) -> dict[str, str]:
    """Our name of each parameter that the query of `GET /instance/previews` has under an older name, and that name."""
    return {ours: theirs for theirs, ours in _OTHER_NAMES.items() if theirs in query}


def preview_spec(query: MultiMapping[str]) -> InstanceSpec:
    """Read a query: `model=…[&context_limit=N][&engine=NAME][&exclude_peers=A,B][&engine_preference=A,B]
    [&mixed_rings=WHEN][&tensor_group=N | &groups=A,B[&groups=C,D]][&group_backend=NAME]`. Raises InputError that names
    the wrong parameter."""
    query = MultiDict((_OTHER_NAMES.get(name, name), value) for name, value in query.items())
    if unknown := sorted(set(query) - _QUERY):
        raise InputError(f"{unknown[0]}: this route does not support this parameter", param=unknown[0])
    model, context_limit, mixed_rings = query.get("model"), query.get("context_limit"), query.get("mixed_rings")
    group_size, group_backend = query.get("tensor_group"), query.get("group_backend")
    if not model:
        raise InputError("model: this parameter is required", param="model")
    if context_limit is not None and not re.fullmatch(r"[1-9][0-9]{0,8}", context_limit):
        message = f"context_limit must be a whole number, at least 1, not {quoted(context_limit)}"
        raise InputError(message, param="context_limit")
    if mixed_rings not in (None, *MIXING):
        raise InputError(f"mixed_rings must be one of {', '.join(MIXING)}", param="mixed_rings")
    if group_size is not None and not re.fullmatch(r"[0-9]{1,3}", group_size):
        raise InputError(f"tensor_group must be a whole number, not {quoted(group_size)}", param="tensor_group")
    if group_backend not in (None, *_BACKENDS):
        raise InputError(f"group_backend must be one of {', '.join(_BACKENDS)}", param="group_backend")
    spec = InstanceSpec(
        model,
        context_limit=int(context_limit) if context_limit else None,
        engine=query.get("engine"),
        exclude_peers=_names(query.get("exclude_peers", "")),
        engine_preference=_names(query.get("engine_preference", ""))[:MAX_PREFERENCES],
        mixed_rings=mixed_rings,
        tensor_group=int(group_size) if group_size else None,
        groups=tuple(map(_names, query.getall("groups", []))),
        group_backend=cast(WishedBackend | None, group_backend),
    )
    _refuse_odd_groups(spec, ())
    return spec


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def instance_spec(body: InstanceBody) -> InstanceSpec:
    """Translate a body to an InstanceSpec. Raises InputError for numbers out of range and for contradictory fields."""
    for name in ("min_peers", "context_limit"):
        value = getattr(body, name)
        if value is not None and not 1 <= value < 2**31:
            raise InputError(f"{name} must be between 1 and {2**31 - 1}", param=name)
    if body.replicas is not None and not 1 <= body.replicas <= MAX_REPLICAS:
        raise InputError(f"replicas must be between 1 and {MAX_REPLICAS}", param="replicas")
    by_hand = [name for name in ("pins", "stages") if getattr(body, name) is not None]
    if by_hand:
        others = [name for name in ("min_peers", "policy", "replicas") if getattr(body, name) is not None]
        if others or len(by_hand) > 1:
            names = " and ".join([*by_hand, *others])
            raise InputError(f"{names} contradict each other: send only one of them", param=by_hand[0])
        if not getattr(body, by_hand[0]):
            raise InputError(f"{by_hand[0]} must name at least one peer with its layers", param=by_hand[0])
    pins = [Pin(peer, start, stop) for peer, (start, stop) in (body.pins or {}).items()]
    pins += [_pin(stage) for stage in body.stages or ()]
    spec = InstanceSpec(
        body.model,
        body.min_peers,
        body.policy,
        body.context_limit,
        _one_engine(body, pins),
        tuple(body.exclude_peers),
        tuple(pins),
        tuple(body.engine_preference),
        body.mixed_rings,
        body.tensor_group,
        tuple(map(tuple, body.groups)),
        body.group_backend,
    )
    _refuse_odd_groups(spec, by_hand)
    return spec


def _pin(stage: StageBody) -> Pin:
    pin = Pin(stage.peer, *stage.layers, stage.engine, stage.reserve_bytes)
    if stage.group is None:
        return pin
    return replace(pin, group=tuple(stage.group.peers), group_backend=stage.group.backend)


def _refuse_odd_groups(spec: InstanceSpec, by_hand: Sequence[str]) -> None:
    """Raises InputError for groups out of range, and for two contradictory ways to ask for them. by_hand: the given
    fields that assign layers to peers."""
    if spec.tensor_group is not None and not 1 <= spec.tensor_group <= MAX_MESH_RANKS:
        raise InputError(f"tensor_group must be between 1 (no group) and {MAX_MESH_RANKS}", param="tensor_group")
    if len(spec.groups) > MAX_GROUPS or any(not 2 <= len(group) <= MAX_MESH_RANKS for group in spec.groups):
        message = f"groups may have at most {MAX_GROUPS} groups, each with 2 to {MAX_MESH_RANKS} peers"
        raise InputError(message, param="groups")
    asked = [name for name in ("tensor_group", "groups") if getattr(spec, name)]
    if asked and (by_hand or len(asked) > 1):
        names = " and ".join([*by_hand, *asked])
        raise InputError(f"{names} contradict each other: send only one of them", param=asked[0])


def _one_engine(body: InstanceBody, pins: Sequence[Pin]) -> str | None:
    """The engine of all stages, if the body asks for one. Raises InputError for contradictory fields."""
    engines = {pin.engine for pin in pins if pin.engine is not None}
    if body.engine is not None and engines - {body.engine}:
        others = " and ".join(sorted(engines - {body.engine}))
        raise InputError(f"engine is {body.engine}, but stages ask for {others}", param="engine")
    if body.engine is not None and (body.engine_preference or body.mixed_rings == "always"):
        other = "engine_preference" if body.engine_preference else "mixed_rings"
        raise InputError(f"engine and {other} contradict each other: send only one of them", param=other)
    if len(body.engine_preference) > MAX_PREFERENCES:
        raise InputError(f"engine_preference may name at most {MAX_PREFERENCES} engines", param="engine_preference")
    return body.engine or (min(engines) if len(engines) == 1 and all(pin.engine for pin in pins) else None)
