"""Finds the instance of a model that serves a request, and opens the stream from its driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from exo_mesh.base.clock import Clock
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.request import FrameTrace, GenerateRequest
from exo_mesh.domain.routing.choice import Job
from exo_mesh.domain.routing.digest import prompt_hashes
from exo_mesh.domain.view import InstanceInfo
from exo_mesh.errors import MemoryPressureError, NoInstanceError, OverloadError
from exo_mesh.rings.placing.choosing import Load, OwnJobs
from exo_mesh.rings.placing.instances import Instances
from exo_mesh.rings.placing.members import Members
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.serving.answer_stages import AnswerLeg, AnswerStage, stages_of
from exo_mesh.rings.serving.instance_timing import LegTimes
from exo_mesh.rings.serving.journal import Journal, JournalEntry
from exo_mesh.rings.serving.redial import ReachedDrivers, Redial
from exo_mesh.wire.control_driver import DriverCall, DriverChannels, Silences

LOADING_S = 5.0
"""Seconds after which a client may try again while a model loads."""

BYTES_PER_TOKEN = 4
"""Of English text, with the usual tokenizers."""


LOOK_EVERY_S, MOST_LOOKS = 0.5, 8
"""At most so many waiting requests are compared with other instances in this time: with 1,000 live requests one
comparison takes a millisecond."""


class MoveLooks(msgspec.Struct):
    """Limits how often waiting requests are compared with other instances."""

    began: float = 0.0
    num_looks: int = 0

    def take(self, now: float) -> bool:
        """Whether one more comparison may be made now."""
        if now - self.began >= LOOK_EVERY_S:
            self.began, self.num_looks = now, 0
        self.num_looks += 1
        return self.num_looks <= MOST_LOOKS


class Dispatcher(msgspec.Struct, frozen=True):
    """The rings that requests of this node can use, running or still to be placed."""

    instances: Instances
    members: Members
    drivers: DriverChannels
    journal: Journal
    clock: Clock
    reached: ReachedDrivers = msgspec.field(default_factory=ReachedDrivers)
    looks: MoveLooks = msgspec.field(default_factory=MoveLooks)
    auto_place: bool = True
    """Whether a request for a model without an instance places one."""
    stand_ins: Callable[[str], list[str]] = lambda model: []
    """The names of served models that can answer for a model."""
    max_queued: int = 2**31
    """Most new requests that wait here for an instance of one model; as many flex requests besides."""

    async def find(
        self,
        entry: JournalEntry,
        refused: tuple[InstanceInfo, MemoryPressureError] | None = None,
        full: frozenset[str] = frozenset(),
    ) -> InstanceInfo:
        """The instance for a request, placed now if there is none. The request counts there from now on, so that the
        next request sees it. refused: the instance and error of a ring that is short of memory; the result is another
        ring. full: instances whose queues have refused the request; the result is another one, if there is one.

        Without auto_place, raises NoInstanceError for a new request without an instance. A request that has begun goes
        on: losing its ring does not undo the placement that somebody asked for.
        """
        if refused is not None:
            chosen = await self.instances.elsewhere(*refused, self._load(entry, full), may_place=self.auto_place)
        elif not self.auto_place and not entry.had_instance and not any(map(self.instances.exists, self._names(entry))):
            raise NoInstanceError(
                f"No instance found for model {entry.model}, and this node places none for a request "
                f'(--no-auto-place): place it with POST /instance {{"model": "{entry.model}"}}',
                param="model",
            )
        else:
            chosen = await self._choose(entry, full)
        entry.instance_id, entry.had_instance = chosen.plan.instance_id, True
        return chosen

    async def _choose(self, entry: JournalEntry, full: frozenset[str]) -> InstanceInfo:
        """Chooses an instance, in this order: one with this very answer; one with the same prompt for another choice;
        the instance expected to finish first; a new one."""
        request = entry.request
        load, names = self._load(entry, full), self._names(entry)
        ready = self._ready(entry, full)
        if request.key_hash and len(ready) > 1:
            asked = (self.drivers.recall(self._address_of(one), request.key_hash) for one in ready)
            kept = [-1 if found is None else found for found in await asyncio.gather(*asked)]
            if max(kept) >= 0:
                return ready[kept.index(max(kept))]
        together = self.journal.instances_of(request.share_id)
        for one in ready:
            if one.plan.instance_id in together:
                return one
        if self.auto_place:
            for name in names[1:]:  # a model server has the model in memory already
                self.instances.place_soon(InstanceSpec(name))
        if len(names) > 1 and ready:
            return self.instances.choice.best(ready, load)
        if entry.is_new and not self.instances.ready_for(entry.model):
            self._refuse_too_many(entry)
        return await self.instances.ensure(InstanceSpec(entry.model), load)

    def _refuse_too_many(self, entry: JournalEntry) -> None:
        """Raises OverloadError for a new request if as many as may queue wait for an instance already. Requests that
        were served before and lost their ring are never refused."""
        if self.journal.place_in_line(entry) >= self.max_queued:
            phase, _, _ = self.instances.progress(entry.model)
            raise OverloadError(
                f"{self.max_queued} requests for {entry.model} are waiting already ({phase})", retry_after_s=LOADING_S
            )

    def _names(self, entry: JournalEntry) -> list[str]:
        """The model and the served models that can answer for it."""
        return [entry.model, *(self.stand_ins(entry.model) if entry.request.text is not None else ())]

    def _fits(self, entry: JournalEntry, instance: InstanceInfo) -> bool:
        """Whether an instance can take the request, with the output so far: as text or as token ids."""
        if instance.plan.takes_text:
            return entry.request.text is not None
        return bool(entry.request.prompt_ids)

    def _ready(self, entry: JournalEntry, full: frozenset[str]) -> list[InstanceInfo]:
        """The instances that could take the request now and have not refused it."""
        tokens = len(entry.request.prompt_ids) + entry.request.max_tokens
        found = (one for name in self._names(entry) for one in self.instances.ready_for(name, tokens))
        return [one for one in found if self._fits(entry, one) and one.plan.instance_id not in full]

    def has_room_besides(self, entry: JournalEntry, full: frozenset[str]) -> bool:
        """Whether a ready instance of the model has not refused the request yet."""
        return bool(self._ready(entry, full))

    def moves(self, entry: JournalEntry, instance: InstanceInfo, full: frozenset[str]) -> bool | None:
        """Whether a request that waits in the queue of an instance should ask another one: a replica that is new, or
        done earlier than expected. It counts there at once, so that not all waiting requests move to the same one. None
        if too many others were compared just now."""
        load, ready = self._load(entry, full), self._ready(entry, full)
        if len(ready) < 2 or entry.request.share_id:
            return False
        if not self.looks.take(self.clock()):
            return None
        ahead = []
        for one in self.journal.on_instances().get(instance.plan.instance_id, ()):
            if one is entry:
                break
            ahead.append(self._job(one))
        found = self.instances.choice.better(ready, instance, ahead, load)
        if found is None:
            return False
        entry.instance_id = found.plan.instance_id
        return True

    def _load(self, entry: JournalEntry, full: frozenset[str]) -> Load:
        tokens = len(entry.request.prompt_ids) + entry.request.max_tokens
        request = entry.request
        return Load(
            self._own_jobs,
            self._job(entry),
            tokens,
            full,
            partial(_hashes, request),
        )

    def computed(self, entry: JournalEntry, instance: InstanceInfo) -> None:
        """Note that an instance has computed the prompt of a request, and keeps it for the next turn."""
        request = entry.request
        if request.is_kept and request.prompt_ids:
            self.instances.choice.computed(instance, _hashes(request))

    def _own_jobs(self) -> OwnJobs:
        live = self.journal.on_instances()
        return {name: [self._job(entry) for entry in entries] for name, entries in live.items()}

    def _job(self, entry: JournalEntry) -> Job:
        """The rest of a request."""
        request, emitted = entry.request, entry.next_index
        if request.ignore_eos:
            output_tokens = float(max(0, request.max_tokens - emitted))
        else:
            output_tokens = self.instances.choice.speeds.output_tokens(entry.model, request.max_tokens, emitted)
        return Job(_prompt_left(entry), output_tokens)

    def answered(self, entry: JournalEntry) -> None:
        """Note that a request ended by itself, so that its length counts as usual for its model."""
        if not entry.request.ignore_eos:
            self.instances.choice.speeds.answered(entry.model, entry.next_index)

    def leg(self, entry: JournalEntry, instance: InstanceInfo) -> LegTimes:
        """Begin to measure the instance by this request."""
        instance_id = instance.plan.instance_id
        ahead = sum(_prompt_left(one) for one in self.journal.waiting_on(instance_id) if one is not entry)
        choice = self.instances.choice

        def num_running() -> int:
            return choice.num_running(instance, self.journal.outstanding()[instance_id])

        entry.prefilled = 0
        stages = stages_of(instance, self.members.name_of)
        entry.legs.begin(AnswerLeg(instance_id, instance.plan.ballot, entry.next_index, stages))
        prompt_tokens = _num_prompt(entry.request) + entry.next_index
        return LegTimes(choice.speed(instance), prompt_tokens, int(ahead), num_running, self.clock)

    def took_over(self, entry: JournalEntry, instance: InstanceInfo, ballot: Ballot) -> None:
        """Note that the ring of an instance goes on with a request under a higher ballot."""
        entry.legs.begin(AnswerLeg(instance.plan.instance_id, ballot, entry.next_index))

    def complete_legs(self, entry: JournalEntry) -> None:
        """Look up the stages of the rings of a request that the view did not show at once."""
        entry.legs.complete(self._stages_of)

    def _stages_of(self, leg: AnswerLeg) -> tuple[AnswerStage, ...]:
        for one in self.members.records_of(leg.instance_id):
            if leg.ballot in (one.ballot, one.plan.ballot) and one.endpoints:
                return stages_of(one, self.members.name_of)
        return ()

    def _address_of(self, instance: InstanceInfo) -> str:
        """The first address to ask for its driver, "host:port"."""
        return self.members.addresses(instance.endpoints[-1], instance.plan.peer_ids[-1])[0]

    def progress(self, model: str) -> tuple[str, int, int]:
        """See Instances.progress."""
        return self.instances.progress(model)

    def is_deleted(self, instance: InstanceInfo) -> bool:
        """See Instances.is_deleted."""
        return self.instances.is_deleted(instance)

    def avoid(self, instance: InstanceInfo) -> None:
        """Let new requests avoid this instance for a while, because it failed one."""
        self.instances.distrust(instance)

    def redial(self, instance: InstanceInfo) -> Redial:
        """A Redial, which decides when the driver of this instance may be dialled again."""
        return Redial(instance.plan, self.members, self.clock, self.reached)

    def call(
        self,
        address: str,
        instance: InstanceInfo,
        request: GenerateRequest,
        silences: Silences,
        on_trace: Callable[[list[FrameTrace]], None],
        on_ballot: Callable[[Ballot], None],
    ) -> DriverCall:
        """Open a call to the driver; see DriverChannels.open. address: "host:port"."""
        return self.drivers.open(
            address, instance.plan, request, silences, on_trace=on_trace, on_ballot=on_ballot, clock=self.clock
        )


def _hashes(request: GenerateRequest) -> list[bytes]:
    """The hashes of the blocks of its prompt; see domain/routing/digest.py."""
    return prompt_hashes(request.prompt_ids, request.cache_scope, [one.spec for one in request.pictures])


def _prompt_left(entry: JournalEntry) -> int:
    """The tokens of its prompt that no ring has computed yet, as far as known."""
    return 0 if entry.last_token_at is not None else max(0, _num_prompt(entry.request) - entry.prefilled)


def _num_prompt(request: GenerateRequest) -> int:
    """The tokens of a prompt, estimated if only its text is known."""
    return len(request.prompt_ids) or (0 if request.text is None else len(request.text.body) // BYTES_PER_TOKEN)
