"""Lists the peers that could take part in a ring, with their engines and usable memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from exo_mesh.domain.device import API, EDGE, PeerInfo
from exo_mesh.domain.engine_speed import speed_of
from exo_mesh.domain.footprint import ENGINE_OVERHEAD_BYTES
from exo_mesh.domain.model import NO_RULES, CardRules, ModelCard
from exo_mesh.domain.ring_candidates import Candidate
from exo_mesh.domain.shard import KeptLayers
from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.placing.retryable import capacity_of
from exo_mesh.rings.placing.spec import InstanceSpec


class Here(msgspec.Struct, frozen=True):
    """What placement needs to know of this machine: the bytes that a stage could get now, the bytes it could get if
    nothing else ran, and the engines that run a model, best first."""

    usable_bytes: Callable[[], int]
    capacity_bytes: Callable[[], int]
    engines_for: Callable[[ModelCard], tuple[str, ...]]


class CandidatePool:
    """The peers of the mesh as placement candidates, built from what each peer reports."""

    def __init__(
        self, membership: Membership, here: Here, rules_of: Callable[[str], CardRules] = lambda model: NO_RULES
    ) -> None:
        """rules_of: what the card of a model says about its peers."""
        self._membership = membership
        self._here = here
        self._rules_of = rules_of

    def max_context(self, model: str) -> int | None:
        """The most tokens of context that a model gets if nobody names a limit; None if its card sets none."""
        return self._rules_of(model).max_context

    def candidates(self, card: ModelCard, spec: InstanceSpec, *, may_fetch: bool = False) -> list[Candidate]:
        """The live peers that have the model and could take part now, each with its engines. may_fetch: also peers that
        would fetch the files first. A peer without telemetry is left out until its telemetry arrives."""
        readings = self._membership.telemetry
        found = []
        for info, has_model in self._able(card, spec, may_fetch=may_fetch):
            engines = self._engines_of(info, card, spec)
            if info.id == self._membership.own.id:
                usable = self._here.usable_bytes()
            elif info.id in readings:
                usable = readings[info.id].usable_bytes
            else:
                continue
            if not has_model:  # it writes the weights to its disk first
                room = readings[info.id].fetch_room_bytes if info.id in readings else 0
                usable = min(usable, room + ENGINE_OVERHEAD_BYTES)
            if engines:
                speed = self._s_per_gb(info, card, spec, engines[0])
                details = (info.engine_info(engine) for engine in engines)
                builds = tuple((detail.name, detail.build) for detail in details if detail is not None)
                tier = self._tier(info, card, spec, engines[0])
                one = Candidate(info.id, usable, engines[0], speed, engines[1:], builds, tier=tier, has_files=has_model)
                found.append(one)
        return found

    def _s_per_gb(self, info: PeerInfo, card: ModelCard, spec: InstanceSpec, engine: str) -> float | None:
        """The speed of an engine with this model if the peer has measured it, else with the models that ran there."""
        if (speed := speed_of(info.engine_speeds, card.digest, engine)) is not None:
            return speed.s_per_gb(card.num_layers, card.step_bytes(0, card.num_layers), spec.policy or "")
        reading = self._membership.telemetry.get(info.id)
        return None if reading is None else reading.s_per_gb.get(engine)

    def on_disk(self, card: ModelCard) -> dict[str, tuple[KeptLayers, ...]]:
        """What peers have on their disks of parts of a model."""
        kept = {info.id: info.kept_of(card.digest) for info in self._membership.view.peers()}
        return {peer_id: found for peer_id, found in kept.items() if found}

    def knows_here(self, card: ModelCard) -> bool:
        """Whether an engine of this node knows the architecture of the model."""
        return bool(self._here.engines_for(card))

    def without_figures(self, card: ModelCard, spec: InstanceSpec) -> list[PeerInfo]:
        """The live peers that could take part but have sent no telemetry yet."""
        readings = self._membership.telemetry
        return [info for info, _ in self._able(card, spec, may_fetch=True) if info.id not in readings]

    def _able(
        self, card: ModelCard, spec: InstanceSpec, *, may_fetch: bool, besides: Sequence[PeerInfo] = ()
    ) -> list[tuple[PeerInfo, bool]]:
        """The live peers that have the model (True) or would fetch its files first (False), and may hold layers of it,
        regardless of memory in use. besides: further peers to consider, also in place of what a live one says."""
        everybody = [self._membership.own, *(peer.info for peer in self._membership.peers), *besides]
        infos = {info.id: info for info in everybody}.values()
        can_be_fetched = any(self._has_model(info, card.name) or info.knows(card.name) for info in infos)
        found = []
        for info in infos:
            is_served = card.architecture == SERVED_ARCHITECTURE
            has_model = info.serves(card.name) is not None if is_served else self._has_model(info, card.name)
            fetches = may_fetch and bool(info.fetches) and can_be_fetched and not is_served
            if info.id not in spec.exclude_peers and (has_model or fetches) and not self._why_not(info, card):
                found.append((info, has_model))
        return found

    def if_empty(self, card: ModelCard, spec: InstanceSpec, besides: Sequence[PeerInfo]) -> list[Candidate]:
        """Like `candidates`, but as if no peer ran anything else and each had room on its disk. besides: further peers
        to consider."""
        readings = self._membership.telemetry
        found = []
        for info, _ in self._able(card, spec, may_fetch=True, besides=besides):
            engines = self._engines_of(info, card, spec)
            own = info.id == self._membership.own.id
            capacity = self._here.capacity_bytes() if own else capacity_of(info, readings.get(info.id))
            if engines and capacity is not None:
                found.append(Candidate(info.id, capacity, engines[0], None, engines[1:]))
        return found

    def _engines_of(self, info: PeerInfo, card: ModelCard, spec: InstanceSpec) -> tuple[str, ...]:
        """The engines with which a peer could run the model, ordered by the preferences of the spec, first choice
        first."""
        if spec.engine:
            return self._rules_of(card.name).allowed(info, (spec.engine,) if spec.engine in info.engines else ())
        rules = self._rules_of(card.name)
        engines = rules.allowed(info, self._all_engines(info, card))
        named = tuple(pin.engine for pin in spec.pins if pin.peer_id == info.id and pin.engine in info.engines)
        pinned = rules.allowed(info, [engine for engine in named if engine])
        tags = {engine: {engine, *_tags(info, engine)} for engine in engines}
        preferred = [e for wanted in spec.engine_preference for e in engines if wanted in tags[e]]
        return tuple(dict.fromkeys([*pinned, *preferred, *engines]))

    def _all_engines(self, info: PeerInfo, card: ModelCard) -> tuple[str, ...]:
        """The engines with which a peer could run the model, whatever the model's card says."""
        own = info.id == self._membership.own.id
        return (self._here.engines_for(card) if own else ()) or info.engines_for(card.name)

    def _tier(self, info: PeerInfo, card: ModelCard, spec: InstanceSpec, engine: str) -> int:
        """The tier of a candidate: all full peers come before edge peers, then the card's preference counts, unless the
        spec names peers or engines itself."""
        if spec.pins or spec.groups:
            return 0
        rules = self._rules_of(card.name)
        rank = 0 if spec.engine or spec.engine_preference else rules.rank(info, engine)
        return rank + (len(rules.preferred) + 1 if info.role == EDGE else 0)

    def left_out(self, card: ModelCard) -> list[str]:
        """The live peers that may not hold layers of a model, each with the reason, for people."""
        infos = [self._membership.own, *(peer.info for peer in self._membership.peers)]
        reasons = ((info, self._why_not(info, card) or self._no_backend(info, card)) for info in infos)
        return [f"{info.name} {why}" for info, why in reasons if why]

    def _no_backend(self, info: PeerInfo, card: ModelCard) -> str:
        rules, engines = self._rules_of(card.name), self._all_engines(info, card)
        has_other = bool(engines) and not rules.allowed(info, engines)
        return f"has none of the backends that the card allows ({', '.join(rules.backends)})" if has_other else ""

    def _why_not(self, info: PeerInfo, card: ModelCard) -> str:
        """Explains why a peer may never hold layers of a model, although it has an engine; "" if it may."""
        if info.role == API:
            return "holds no layers (--role api or --max-memory 0)"
        rules = self._rules_of(card.name)
        memory_bytes = max((device.memory_bytes for device in info.devices), default=0)
        if not memory_bytes and rules.min_memory_bytes:  # a peer of an older version
            reading = self._membership.telemetry.get(info.id)
            memory_bytes = reading.total_bytes if reading is not None else 0
        return rules.why_not(info, memory_bytes)

    def _has_model(self, info: PeerInfo, model: str) -> bool:
        # A model named by its directory, or added since the last disk scan, is in no peer's list yet.
        if info.id == self._membership.own.id and not info.knows(model):
            return not any(peer.info.knows(model) for peer in self._membership.peers)
        return model in info.models


def _tags(info: PeerInfo, engine: str) -> tuple[str, ...]:
    detail = info.engine_info(engine)
    return () if detail is None else (detail.tag,)
