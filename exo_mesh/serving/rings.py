"""Finds the instance of a model that serves a request, and opens the stream from its driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from exo_mesh.clock import Clock
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.request import FrameTrace, GenerateRequest
from exo_mesh.domain.view import InstanceInfo
from exo_mesh.errors import MemoryPressureError, NoInstanceError
from exo_mesh.instances.instances import Instances, Load
from exo_mesh.instances.members import Members
from exo_mesh.instances.spec import InstanceSpec
from exo_mesh.serving.journal import Journal, JournalEntry
from exo_mesh.serving.redial import ReachedDrivers, Redial
from exo_mesh.transport.control_driver import DriverCall, DriverChannels, Silences


@dataclass(frozen=True, slots=True)
class Rings:
    """The rings that requests of this node can use, running or still to be placed."""

    instances: Instances
    members: Members
    drivers: DriverChannels
    journal: Journal
    clock: Clock
    reached: ReachedDrivers = field(default_factory=ReachedDrivers)
    auto_place: bool = True
    """Whether a request for a model without an instance places one."""
    stand_ins: Callable[[str], list[str]] = lambda model: []
    """The names of served models that can answer for a model."""

    async def find(
        self, entry: JournalEntry, refused: tuple[InstanceInfo, MemoryPressureError] | None = None
    ) -> InstanceInfo:
        """The instance for a request, placed now if there is none. The request counts there from now on, so that the
        next request sees it. refused: the instance and error of a ring that is short of memory; the result is another
        ring.

        Without auto_place, raises NoInstanceError for a new request without an instance. A request that has begun goes
        on: losing its ring does not undo the placement that somebody asked for.
        """
        if refused is not None:
            chosen = await self.instances.elsewhere(*refused, self._load(entry), may_place=self.auto_place)
        elif not self.auto_place and not entry.had_instance and not any(map(self.instances.exists, self._names(entry))):
            raise NoInstanceError(
                f"No instance found for model {entry.model}, and this node places none for a request "
                f'(--no-auto-place): place it with POST /instance {{"model": "{entry.model}"}}',
                param="model",
            )
        else:
            chosen = await self._choose(entry)
        entry.instance_id, entry.had_instance = chosen.plan.instance_id, True
        return chosen

    async def _choose(self, entry: JournalEntry) -> InstanceInfo:
        """The instance that keeps this very answer, or that computes the same prompt for another choice, or the least
        busy one, or one that is placed now."""
        request = entry.request
        load, names = self._load(entry), self._names(entry)
        found = (one for name in names for one in self.instances.ready_for(name, load.tokens))
        ready = [one for one in found if self._fits(entry, one)]
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
            return self.instances.least_busy(ready, load)
        return await self.instances.ensure(InstanceSpec(entry.model), load)

    def _names(self, entry: JournalEntry) -> list[str]:
        """The model and the served models that can answer for it."""
        return [entry.model, *(self.stand_ins(entry.model) if entry.request.text is not None else ())]

    def _fits(self, entry: JournalEntry, instance: InstanceInfo) -> bool:
        """Whether an instance can take the request, with the output so far: as text or as token ids."""
        if instance.plan.takes_text:
            return entry.request.text is not None
        return bool(entry.request.prompt_ids)

    def _load(self, entry: JournalEntry) -> Load:
        return Load(self.journal.outstanding(), len(entry.request.prompt_ids) + entry.request.max_tokens)

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
