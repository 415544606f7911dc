"""Lists the ways to place a model now, with the arithmetic: what `POST /instance` would do, without doing it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.engine_speed import PROMPT_TOKENS, Prediction
from exo_mesh.domain.footprint import footprint
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.peer_names import matching, peer_named
from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.placement import POLICIES, refuse_too_few, solve
from exo_mesh.domain.plan import NO_BALLOT, Plan
from exo_mesh.domain.tensor_group import sharded
from exo_mesh.engine.registry import installed_names
from exo_mesh.errors import InputError, PlacementError
from exo_mesh.rings.placing.planner import Planner
from exo_mesh.rings.placing.spec import InstanceSpec

MAX_WIDTH = 16
"""Wider rings than this are not previewed: every further hop makes each token slower."""

_PEER_ID = re.compile(r"[0-9a-f]{16,64}")


def with_peer_ids(spec: InstanceSpec, peers: Sequence[PeerInfo]) -> InstanceSpec:
    """The spec with peer ids instead of names. Raises InputError for a name that no peer has, or that several peers
    have, for an engine that does not exist, and for a pinned group whose first peer is not the peer of its stage."""
    _check_engines(spec, peers)
    return replace(
        spec,
        exclude_peers=tuple(_peer_id(name, peers, "exclude_peers") for name in spec.exclude_peers),
        pins=tuple(_with_ids(pin, peers) for pin in spec.pins),
        groups=tuple(tuple(_peer_id(name, peers, "groups") for name in group) for group in spec.groups),
    )


def _check_engines(spec: InstanceSpec, peers: Sequence[PeerInfo]) -> None:
    """Raises InputError for an engine that no peer has, and for a preference that names no engine at all. A preference
    for an engine that only other machines have is no mistake."""
    here = {engine for peer in peers for engine in peer.engines}
    pinned = [("stages", pin.engine) for pin in spec.pins if pin.engine]
    for param, engine in [("engine", spec.engine), *pinned]:
        if engine and engine not in here:
            listed = ", ".join(sorted(here)) or "none"
            raise InputError(
                f"no peer has an engine {_quoted(engine[:80])}; engines of the mesh: {listed}", param=param
            )
    known = here | {tag for peer in peers for tag in peer.tags} | installed_names()
    for wanted in spec.engine_preference:
        if not {wanted, wanted.partition("-")[0]} & known:
            raise InputError(
                f"engine_preference: there is no engine {_quoted(wanted[:80])}; engines: {', '.join(sorted(here))}, "
                "also with their build, as in torch-cuda",
                param="engine_preference",
            )


def _with_ids(pin: Pin, peers: Sequence[PeerInfo]) -> Pin:
    peer_id = _peer_id(pin.peer_id, peers, "pins")
    group = tuple(_peer_id(name, peers, "pins") for name in pin.group)
    if group and group[0] != peer_id:
        raise InputError(
            f"the peer of a stage must come first in its group, but {_quoted(pin.peer_id[:80])} does not",
            param="stages",
        )
    return replace(pin, peer_id=peer_id, group=group)


def _peer_id(name: str, peers: Sequence[PeerInfo], param: str) -> str:
    if _PEER_ID.fullmatch(name) and not matching(name, peers):
        return name  # the id of a peer that is not connected now
    return peer_named(name, peers, param).id


def _quoted(name: str) -> str:
    """A name as a JSON string, for an error."""
    return json.dumps(name, ensure_ascii=False)


async def previews(
    planner: Planner, card: ModelCard, spec: InstanceSpec, peers: Sequence[PeerInfo]
) -> list[dict[str, Any]]:
    """For each width and policy: a plan, or the reason why there is none. Plans that several policies share are listed
    once."""
    candidates = planner.candidates(card, spec, may_fetch=True)
    try:
        refuse_too_few(card, candidates, 1)
    except PlacementError as exc:
        raise await planner.judge(card, spec, planner.naming_left_out(card, exc)) from exc
    names = {peer.id: peer.name for peer in peers}
    usable = {candidate.peer_id: candidate.usable_bytes for candidate in candidates}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    refused: list[dict[str, Any]] = []
    for width in range(1, min(len(candidates), card.num_layers, MAX_WIDTH) + 1):
        refusal: PlacementError | None = None
        for policy in POLICIES:
            try:
                plan = await planner.propose(card, replace(spec, policy=policy, min_peers=width))
            except PlacementError as exc:
                refusal = exc
                continue
            key = (plan.context_limit, *((s.peers, s.engine, s.shard.start, s.shard.stop) for s in plan.stages))
            held = {engine: await planner.held(card, engine) for engine in plan.engines}
            described = _describe(held, plan, names, usable, spec, planner.note_of(plan, spec))
            entry = found.setdefault(key, {**described, "predicted": _predicted(planner.prediction(card, plan))})
            if policy not in entry["policies"]:
                entry["policies"].append(policy)
        if all(entry["width"] != width for entry in found.values()):
            refused.append(_why_not(planner, card, spec, width, refusal))
    for entry in found.values():
        entry["policies"].sort(key=POLICIES.index)
    return sorted([*found.values(), *refused], key=lambda entry: int(entry["width"]))


async def preview(planner: Planner, card: ModelCard, spec: InstanceSpec, peers: Sequence[PeerInfo]) -> dict[str, Any]:
    """The plan that the spec would get now. Raises PlacementError."""
    try:
        plan = await planner.propose(card, spec)
    except PlacementError as exc:
        raise await planner.judge(card, spec, exc) from exc
    names = {peer.id: peer.name for peer in peers}
    usable = {one.peer_id: one.usable_bytes for one in planner.candidates(card, spec, may_fetch=True)}
    held = {engine: await planner.held(card, engine) for engine in plan.engines}
    described = _describe(held, plan, names, usable, spec, planner.note_of(plan, spec))
    predicted = _predicted(planner.prediction(card, plan))
    return {**described, "policies": [plan.inputs.policy], "predicted": predicted}


def _predicted(prediction: Prediction | None) -> dict[str, float | int] | None:
    """A prediction as JSON; None if the engines of the plan have not been measured with the model."""
    if prediction is None:
        return None
    figures = {"tokens_per_s": round(prediction.tokens_per_s, 3), "ttft_s": round(prediction.ttft_s, 4)}
    return {**figures, "prompt_tokens": PROMPT_TOKENS}


def _describe(
    held: Mapping[str, ModelCard],
    plan: Plan,
    names: dict[str, str],
    usable: dict[str, int],
    spec: InstanceSpec,
    note: str,
) -> dict[str, Any]:
    """held: the model card as each engine holds it; each stage of a mixed ring uses its own engine's card. The figures
    of a tensor group are those of each rank."""
    stages = []
    for stage in plan.stages:
        as_held = sharded(held[stage.engine], len(stage.peers))
        parts = footprint(as_held, stage.shard.start, stage.shard.stop, plan.kv_tokens, plan.pool_sequences)
        room = min(usable[peer_id] for peer_id in stage.peers)
        stages.append(
            {
                "peer": stage.peer_id,
                "name": names.get(stage.peer_id, ""),
                "engine": stage.engine,
                "layers": [stage.shard.start, stage.shard.stop],
                "weights_bytes": parts.weights_bytes,
                "kv_bytes": parts.kv_bytes,
                "overhead_bytes": parts.overhead_bytes,
                "reserve_bytes": stage.reserve_bytes,
                "usable_bytes": room,
                "headroom_bytes": room - stage.reserve_bytes,
                **({} if stage.group is None else {"group": stage.group.describe()}),
            }
        )
    return {
        "width": len(plan.member_ids),
        "note": note,
        "policies": [],
        "context_limit": plan.context_limit,
        "kv_pool_tokens": plan.kv_tokens,
        "engines": list(plan.engines),
        "activation_dtype": plan.activation_dtype,
        "stages": stages,
        "request": {"model": spec.model, "context_limit": plan.context_limit, "stages": stages},
    }


def _why_not(
    planner: Planner, card: ModelCard, spec: InstanceSpec, width: int, refusal: PlacementError | None
) -> dict[str, Any]:
    """Why there is no plan of this width: what the largest `width` peers lack, or that their engines must not be
    mixed."""
    if refusal is not None and refusal.reason in ("mixing", "tensor_group"):
        return {"width": width, "policies": list(POLICIES), "refused": {"message": str(refusal), **refusal.details}}
    largest = sorted(planner.candidates(card, spec, may_fetch=True), key=lambda c: (-c.usable_bytes, c.peer_id))[:width]
    try:
        solve(
            card,
            largest,
            policy="memory",
            min_peers=width,
            context_limit=min(planner.context_for(spec), card.context_length),
            instance_id="preview",
            ballot=NO_BALLOT,
        )
    except PlacementError as exc:
        refusal = exc
    message = (
        str(refusal) if refusal is not None else f"{card.name}: rings of {width} peers are no better than those listed"
    )
    details = refusal.details if refusal is not None else {}
    return {"width": width, "policies": list(POLICIES), "refused": {"message": message, **details}}
