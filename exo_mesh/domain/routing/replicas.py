"""Decides when a model gets one more instance because its requests queue or its peers drain, and when one is given
back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

QUEUE_S = 5.0
"""All instances of a model must be full, with requests waiting, for this long before one more is placed: loading takes
seconds, so a shorter queue is over before the new instance could help."""

LEAVING_S = 2.0
"""Requests must run on rings with draining peers for this long before another ring is placed: short ones end before it
would have loaded, and then the drain is over."""

IDLE_S = 300.0
"""The load of a model must have been low for this long before an instance is given back; also the shortest life of an
instance that was placed in this way."""

LAST_IDLE_S = 3600.0
"""An instance that is missed sooner after it was given back than its load had been low before should have stayed: the
others may be slower than it was. The load must then be low for twice as long before the next one is given back, and so
on up to this time. It is IDLE_S again once an instance was not missed so soon."""

LOW = 0.5
"""The load is low while the requests would fill at most this part of the slots of the other instances. An instance is
placed only when all slots are full, so the load must change by half between the two."""

HOLD_S = 60.0
"""After an instance was given back no other one is placed for this long."""

FIRST_RETRY_S, LAST_RETRY_S = 15.0, 600.0
"""Pause after a placement that failed, mostly for lack of memory; it doubles with each failure."""

SMALL = 0.5
"""An instance that nobody asked for takes at most this part of the free memory of each of its peers: other models need
room too."""


class ReplicaAction(StrEnum):
    """What to do about the number of instances of a model."""

    PLACE = "place"
    REPLACE = "replace"
    """Place one on peers that do not drain, for the requests that keep the others from draining."""
    GIVE_BACK = "give back"


class ReplicaUse(msgspec.Struct, frozen=True):
    """A ready instance. waiting, outstanding: requests in its queue, and with the running ones. slots: requests that it
    runs at once. is_auto: the mesh placed it by itself, and nobody has asked for it since. is_mine: this node owns
    it. is_leaving: one of its peers drains."""

    instance_id: str
    waiting: int
    outstanding: int
    slots: int
    is_auto: bool = False
    is_mine: bool = True
    is_leaving: bool = False

    @property
    def is_full(self) -> bool:
        return self.waiting > 0 or self.outstanding >= self.slots


class ModelLoad(msgspec.Struct, frozen=True):
    """All instances of a model that are ready, in the order in which they are numbered.

    may_place: this node is the one that places instances of the model. is_changing: an instance is being placed or
    recovered. max_instances: number of peers. is_free: an instance takes no memory, because a model server has the
    model anyway.
    """

    instances: Sequence[ReplicaUse]
    may_place: bool
    is_changing: bool
    max_instances: int
    is_free: bool = False

    @property
    def last_auto(self) -> ReplicaUse | None:
        """The only instance that may be given back: the last automatically placed instance."""
        return next((one for one in reversed(self.instances) if one.is_auto), None)


class ReplicaPolicy:
    """Follows one model. Every owner of an instance of the model has one; `step` is called about once a second."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}
        self._full_since: float | None = None
        self._low_since: float | None = None
        self._leaving_since: float | None = None
        self._not_before = float("-inf")
        self._retry_s = FIRST_RETRY_S
        self._idle_s = IDLE_S
        self._gave_back_at: float | None = None

    def step(self, use: ModelLoad, now: float) -> ReplicaAction | None:
        """What this node should do now. A caller that gets PLACE or REPLACE calls `failed` if that is impossible."""
        known = {one.instance_id: one.is_auto for one in use.instances}
        if known != self._known:
            if any(is_auto and name not in known for name, is_auto in self._known.items()):
                self._not_before = max(self._not_before, now + HOLD_S)
            self._known, self._full_since, self._low_since = known, None, None
        if use.is_changing or not use.instances:
            self._full_since = self._low_since = self._leaving_since = None
            return None
        self._leaving_since = _since(self._leaving_since, _keeps_peers_from_draining(use), now)
        if self._should_replace(use, now):
            return ReplicaAction.REPLACE
        self._full_since = _since(self._full_since, _is_queueing(use), now)
        self._low_since = _since(self._low_since, _is_low(use), now)
        if self._should_place(use, now):
            self._note_missed(now)
            return ReplicaAction.PLACE
        if self._should_give_back(use, now):
            self._gave_back_at = now
            return ReplicaAction.GIVE_BACK
        return None

    def failed(self, now: float) -> None:
        """Note that no further instance can be placed now."""
        self._not_before = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def placed(self) -> None:
        """Note that an instance was placed."""
        self._retry_s = FIRST_RETRY_S

    def _note_missed(self, now: float) -> None:
        """Learn from the time after which the instance that was given back last is missed; see LAST_IDLE_S."""
        if self._gave_back_at is None:
            return
        was_soon = now - self._gave_back_at < self._idle_s
        self._idle_s = min(2 * self._idle_s, LAST_IDLE_S) if was_soon else IDLE_S
        self._gave_back_at = None

    def _should_place(self, use: ModelLoad, now: float) -> bool:
        if not use.may_place or len(use.instances) >= use.max_instances or now < self._not_before:
            return False
        return self._full_since is not None and now - self._full_since >= (0.0 if use.is_free else QUEUE_S)

    def _should_replace(self, use: ModelLoad, now: float) -> bool:
        if not use.may_place or now < self._not_before:
            return False
        return self._leaving_since is not None and now - self._leaving_since >= LEAVING_S

    def _should_give_back(self, use: ModelLoad, now: float) -> bool:
        last = use.last_auto
        others = [one for one in use.instances if one is not last and not one.is_leaving]
        if last is None or not last.is_mine or last.outstanding or not others:
            return False
        return self._low_since is not None and now - self._low_since >= self._idle_s


def _since(since: float | None, holds: bool, now: float) -> float | None:
    """Since when a condition has held without a break."""
    if not holds:
        return None
    return now if since is None else since


def _is_queueing(use: ModelLoad) -> bool:
    return any(one.waiting for one in use.instances) and all(one.is_full for one in use.instances)


def _keeps_peers_from_draining(use: ModelLoad) -> bool:
    return all(one.is_leaving for one in use.instances) and any(one.outstanding for one in use.instances)


def _is_low(use: ModelLoad) -> bool:
    last = use.last_auto
    if last is None:
        return False
    others = sum(one.slots for one in use.instances if one is not last and not one.is_leaving)
    return sum(one.outstanding for one in use.instances) <= LOW * others
