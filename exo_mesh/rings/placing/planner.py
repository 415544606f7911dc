"""Solves plans for instance specs, from what this node knows of the peers and of the model. Reserves nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

from msgspec.structs import replace

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.engine_speed import Prediction, predict, speed_of
from exo_mesh.domain.footprint import POOL_TOKENS
from exo_mesh.domain.group_placement import pinned_groups, place_grouped
from exo_mesh.domain.grouping import GroupFacts, GroupWish
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.pinning import solve_pinned
from exo_mesh.domain.placement import most_context, solve, solve_with_most_context, with_caps
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan
from exo_mesh.domain.ring_candidates import DEFAULT_HOP_S, Candidate, Surroundings, by_tier, without
from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE
from exo_mesh.errors import (
    InputError,
    ModelError,
    PlacementError,
)
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.mixed_ring_test import MixedRingTest
from exo_mesh.models.surveys import Surveys, as_held
from exo_mesh.rings.placing.candidate_pool import CandidatePool
from exo_mesh.rings.placing.group_facts import GroupKnowledge
from exo_mesh.rings.placing.retryable import finds_plan, judged, memory_in_use
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.settings.effective import EffectiveSettings

_log = logging.getLogger(__name__)


class Planner:
    """Makes the plans that this node would propose. Does not know which instances exist."""

    def __init__(
        self,
        effective: EffectiveSettings,
        membership: Membership,
        surveys: Surveys,
        mixing: MixedRingTest,
        pool: CandidatePool,
        groups: GroupKnowledge,
    ) -> None:
        self._effective = effective
        self._membership = membership
        self._surveys = surveys
        self._mixing = mixing
        self._pool = pool
        self._groups = groups

    async def propose(
        self,
        card: ModelCard,
        spec: InstanceSpec,
        instance_id: str = "preview",
        ballot: Ballot | None = None,
        caps: Mapping[str, int] | None = None,
        *,
        hopeless: bool = False,
    ) -> Plan:
        """The plan that this node would propose now. Raises PlacementError with the arithmetic.

        Peers that would first have to fetch files take part only if the peers that have the files cannot run the model
        alone, and never after the model has crashed (`hopeless`); peers of a higher tier only if the others cannot run
        it alone. Only the engines that a plan would use are asked about the model and compared with each other.
        """
        ballot = ballot or NO_BALLOT.next_for(self._membership.own.id)
        holders = with_caps(self.candidates(card, spec), caps or {})
        everybody = with_caps(self.candidates(card, spec, may_fetch=True), caps or {})
        pools = [*by_tier(holders)] or [holders]
        if not hopeless and len(everybody) > len(holders):
            pools += by_tier(everybody)
        for pool in pools[:-1]:
            try:
                return await self._propose(card, spec, instance_id, ballot, pool)
            except (PlacementError, ModelError, InputError) as exc:
                _log.debug("%s: the most wanted peers cannot run it: %s", instance_id, exc)
        try:
            return await self._propose(card, spec, instance_id, ballot, pools[-1])
        except PlacementError as exc:
            await self._require_engine(card, pools[-1])
            raise self.naming_left_out(card, exc) from exc

    async def _require_engine(self, card: ModelCard, candidates: Sequence[Candidate]) -> None:
        """Raises ModelError if no candidate has an engine that can run the model, so that nobody is asked to free
        memory for it. An engine of this node that knows the architecture is not asked."""
        if not candidates or self._pool.knows_here(card):
            return
        failures: dict[str, ModelError] = {}
        for engine in dict.fromkeys(engine for one in candidates for engine in (one.engine, *one.others)):
            try:
                await self.held(card, engine)
                return
            except ModelError as exc:
                failures[engine] = exc
        raise _no_engine(card, failures)

    def naming_left_out(self, card: ModelCard, refusal: PlacementError) -> PlacementError:
        """The refusal with the peers that may not hold layers of the model, and what to do about them."""
        left_out = "; ".join(self._pool.left_out(card))
        if not left_out:
            return refusal
        remedy = refusal.remedy
        if refusal.reason in ("no_candidates", "too_few_peers"):
            remedy = f"start another peer, or one of these with other settings: {left_out}"
        return PlacementError(
            f"{refusal}; left out: {left_out}",
            reason=refusal.reason,
            need_bytes=refusal.need_bytes,
            have=refusal.have,
            remedy=remedy,
        )

    async def _propose(
        self, card: ModelCard, spec: InstanceSpec, instance_id: str, ballot: Ballot, candidates: list[Candidate]
    ) -> Plan:
        is_even = self._effective.now.proportional_layers == "off"
        around = Surroundings(hop_s=self._hops(), even=is_even, on_disk=self._pool.on_disk(card))
        facts = await self._groups.facts(card, spec, num_candidates=len(candidates))
        while True:
            try:
                wish = self._groups.wish(spec, candidates)
                attempt = partial(self._solve, card, spec, candidates, instance_id, ballot, around, facts, wish)
                plan = await asyncio.to_thread(attempt)
            except PlacementError:
                unseen = _pinned_engines(spec, candidates) - around.cards.keys()
                if not unseen:
                    raise
                # By the size of its files only: the engine may hold the model in more or fewer bytes.
                around, candidates = await self._look(card, candidates, sorted(unseen), around)
                continue
            unseen = set(plan.engines) - around.cards.keys()
            if unseen:
                around, candidates = await self._look(card, candidates, sorted(unseen), around)
                continue
            if len(plan.engines) == 1:
                return plan
            outcome = await self._mixing.of(card, ring_of(plan, candidates))
            if not outcome.unmixable:
                return replace(plan, activation_dtype=outcome.activation_dtype)
            around = replace(around, unmixable={**around.unmixable, **outcome.unmixable})

    async def held(self, card: ModelCard, engine: str) -> ModelCard:
        """The model as an engine holds it, which may differ from its files. Raises ModelError if the engine cannot run
        it."""
        return as_held(card, await self._surveys.of(card, engine))

    async def _look(
        self, card: ModelCard, candidates: list[Candidate], engines: Sequence[str], around: Surroundings
    ) -> tuple[Surroundings, list[Candidate]]:
        """Ask these engines about the model. Returns the extended surroundings and the candidates without engines that
        cannot run the model.

        Raises ModelError if no candidate is left.
        """
        cards = dict(around.cards)
        for engine in engines:
            try:
                cards[engine] = await self.held(card, engine)
            except ModelError as exc:
                _log.info("%s cannot run %s: %s", engine, card.name, exc)
                candidates = [able for one in candidates if (able := without(one, engine)) is not None]
                if not candidates:
                    raise _no_engine(card, {engine: exc}) from exc
        return replace(around, cards=cards), candidates

    def note_of(self, plan: Plan, spec: InstanceSpec) -> str:
        """The facts about the plan's tensor groups, or why it has none where one might be expected; "" if nothing."""
        return self._groups.note_of(plan, spec)

    def context_for(self, spec: InstanceSpec) -> int:
        """Smallest context, in tokens, that a placement for this spec needs."""
        return spec.context_limit or self._effective.now.context_limit or POOL_TOKENS

    def _solve(
        self,
        card: ModelCard,
        spec: InstanceSpec,
        candidates: Sequence[Candidate],
        instance_id: str,
        ballot: Ballot,
        around: Surroundings,
        facts: GroupFacts,
        wish: GroupWish,
    ) -> Plan:
        """In another thread: all that it needs of the mesh, which may change meanwhile, is given."""
        policy = spec.policy or self._effective.now.placement
        is_served = card.architecture == SERVED_ARCHITECTURE
        min_peers = spec.min_peers or (1 if is_served else self._effective.now.min_peers)
        if (spec.context_limit or 0) > card.context_length:
            raise InputError(
                f"context_limit is {spec.context_limit}, but {card.name} supports at most {card.context_length} tokens",
                param="context_limit",
            )
        shared: dict[str, Any] = {
            "instance_id": instance_id,
            "ballot": ballot,
            "around": around,
            "mixing": spec.mixed_rings or self._effective.now.mixed_rings,
        }
        context_limit = spec.context_limit or self._effective.now.context_limit
        if spec.pins:
            return _pinned(card, candidates, spec, facts, context_limit, shared)

        def attempt(grouped: Sequence[Candidate], min_stages: int) -> Plan:
            wide: dict[str, Any] = {**shared, "policy": policy, "min_peers": min_stages}
            if context_limit is None:
                return solve_with_most_context(self._capped(card), grouped, **wide)
            return solve(card, grouped, context_limit=min(context_limit, card.context_length), **wide)

        return place_grouped(candidates, wish, facts, min_peers, attempt)

    def _capped(self, card: ModelCard) -> ModelCard:
        """The model with the longest context that its card recommends, for an instance without a limit of its own."""
        most = self._pool.max_context(card.name)
        return card if most is None or most >= card.context_length else replace(card, context_length=most)

    async def judge(self, card: ModelCard, spec: InstanceSpec, refusal: PlacementError) -> PlacementError:
        """Classify a refusal as permanent or temporary; see outlook.judged."""
        membership = self._membership

        async def fits(besides: Sequence[PeerInfo]) -> bool:
            ballot = NO_BALLOT.next_for(membership.own.id)
            everybody = self._pool.if_empty(card, spec, besides)
            return await finds_plan(self._propose(card, spec, "preview", ballot, everybody))

        peers = [membership.own, *(peer.info for peer in membership.peers)]
        return await judged(
            refusal,
            silent=self._pool.without_figures(card, spec),
            gone=[info for info in membership.gone if info.id not in spec.exclude_peers],
            awaited=membership.awaited,
            in_use=memory_in_use(peers, membership.telemetry),
            fits=fits,
        )

    def candidates(self, card: ModelCard, spec: InstanceSpec, *, may_fetch: bool = False) -> list[Candidate]:
        """See CandidatePool.candidates."""
        spec = replace(spec, policy=spec.policy or self._effective.now.placement)
        return self._pool.candidates(card, spec, may_fetch=may_fetch)

    def prediction(self, card: ModelCard, plan: Plan) -> Prediction | None:
        """What one client can expect of a plan; None unless each peer has measured its engine with this model."""
        infos = {info.id: info for info in self._membership.view.peers()}
        stages = []
        for stage in plan.stages:
            info = infos.get(stage.peer_id)
            speed = None if info is None else speed_of(info.engine_speeds, card.digest, stage.engine)
            if speed is None or stage.group is not None:
                return None
            stages.append((speed, len(stage.shard)))
        hops = Surroundings(hop_s=self._hops()).ring_hops([stage.peer_id for stage in plan.stages])
        return predict(stages, hops.total_s)

    def _hops(self) -> dict[tuple[str, str], float]:
        """Seconds one way by pair of peers: half of each round trip measured here; between two other peers, the larger
        half."""
        own_id = self._membership.own.id
        halves = {peer.id: peer.rtt_ms / 2000 for peer in self._membership.peers if peer.rtt_ms is not None}
        between = {(a, b): max(halves[a], halves[b]) for a, b in combinations(sorted(halves), 2)}
        return {**between, **{(own_id, peer_id): half for peer_id, half in halves.items()}}

    def hop_of(self, plan: Plan) -> float:
        """Seconds one way between two peers of the plan: the longest that is known."""
        hops = self._hops()
        known = [hops[pair] for pair in combinations(plan.member_ids, 2) if pair in hops]
        known += [hops[b, a] for a, b in combinations(plan.member_ids, 2) if (b, a) in hops]
        return max(known, default=DEFAULT_HOP_S)


def _no_engine(card: ModelCard, failures: Mapping[str, ModelError]) -> ModelError:
    """The error for a model that no engine of the candidates can run. failures: what each engine said."""
    reasons = "; ".join(f"{engine}: {exc}" for engine, exc in failures.items())
    return ModelError(f"no peer can run {card.name} ({card.architecture}): {reasons}")


def _pinned(
    card: ModelCard,
    candidates: Sequence[Candidate],
    spec: InstanceSpec,
    facts: GroupFacts,
    context_limit: int | None,
    shared: Mapping[str, Any],
) -> Plan:
    """The plan that the pins of the spec define. Raises InputError or PlacementError, see solve_pinned."""
    grouped, pins = pinned_groups(candidates, spec.pins, facts)

    def pinned(context: int) -> Plan:
        return solve_pinned(card, grouped, pins, context_limit=context, **shared)

    return most_context(card, pinned) if context_limit is None else pinned(min(context_limit, card.context_length))


def _pinned_engines(spec: InstanceSpec, candidates: Sequence[Candidate]) -> set[str]:
    """The engines that would hold the layers that the spec pins; none if it pins no layers."""
    usual = {candidate.peer_id: candidate.engine for candidate in candidates}
    return {engine for pin in spec.pins if (engine := pin.engine or usual.get(pin.peer_id))}


def ring_of(plan: Plan, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates of a plan's stages, each with the engine that the plan gives it. A peer that could take no further
    ring, because the model's card has changed, counts as one with an unknown build."""
    by_id = {candidate.peer_id: candidate for candidate in candidates}
    found = ((stage, by_id.get(stage.peer_id)) for stage in plan.stages)
    return [one.running(s.engine) if one is not None else Candidate(s.peer_id, 0, s.engine) for s, one in found]
