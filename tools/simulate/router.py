"""Random histories of requests, speeds, losses and drains, played against the router and the policy of replicas.

The decisions are the real ones (exo_mesh/domain/routing). Instances are formulas: `slots` requests at once, one prompt
after the other, and steps that take longer with more requests. Readings of other peers are up to a second old.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from exo_mesh.domain.routing.choice import MOST_MOVES, Job, Option, better_than, choose
from exo_mesh.domain.routing.replicas import (
    HOLD_S,
    IDLE_S,
    LAST_IDLE_S,
    ModelLoad,
    ReplicaAction,
    ReplicaPolicy,
    ReplicaUse,
)
from exo_mesh.domain.routing.speed import Speed, Speeds
from exo_mesh.rings.serving.dispatcher import LOOK_EVERY_S, MOST_LOOKS
from exo_mesh.rings.serving.request_run import LOOK_AGAIN_S
from tools.simulate.served import SimInstance, SimRequest

TICK_S = 1.0
"""Interval of readings and of the replica policy."""

DETECT_S = 1.0
"""Time until the requests on a lost instance are sent elsewhere."""

RETURN_S = 8.0
"""Time until a lost instance is back, if its peer is."""

NOISE = 0.1
"""Relative standard deviation of a measured step."""

MODEL = "m"


@dataclass(slots=True)
class History:
    """The result of one history. reversals: how often an instance was placed after one was given back, while the rate
    of requests was the same from the time in which the load was low until then."""

    seed: int
    problems: list[str] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    placed: int = 0
    given_back: int = 0
    losses: int = 0
    moved: int = 0
    reversals: int = 0


class World:
    """One history. knows: the router gets the true speeds and counts, as an oracle does."""

    def __init__(self, seed: int, *, knows: bool = False) -> None:
        self.rng = random.Random(seed)
        self.draws = random.Random(seed + 1)
        self.history = History(seed)
        self.knows = knows
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.num_events = 0
        self.num_peers = self.rng.randint(3, 8)
        self.free_peers = set(range(self.num_peers))
        self.dead_peers: set[int] = set()
        self.entries = [Speeds() for _ in range(self.rng.randint(1, 4))]
        self.instances: dict[str, SimInstance] = {}
        self.reports: dict[str, Counter[int]] = {}
        self.readings: dict[str, tuple[int, int]] = {}
        self.policies = [ReplicaPolicy() for _ in range(self.num_peers)]
        self.placing = False
        self.homeless: list[SimRequest] = []
        self.live = 0
        self.actions: list[tuple[float, str, int]] = []
        """Time, what was done, and the peer that decided it."""
        self.changes: list[float] = [0.0]
        self.prompt, self.output = self.rng.choice([(32, 32), (500, 100), (2000, 300), (100, 1)])
        slots = self.rng.choice([1, 4, 32])
        self.speed_s = self.rng.choice([0.01, 0.03, 0.1])
        for _ in range(self.rng.randint(1, max(1, self.num_peers - 2))):
            self._begin(self._new_instance(slots, is_auto=False))
        self.slots = slots

    # the world

    def _new_instance(self, slots: int, *, is_auto: bool) -> SimInstance:
        peer = self.draws.choice(sorted(self.free_peers))
        self.free_peers.discard(peer)
        number = next(n for n in range(1, 100) if f"m-{n}" not in self.instances)
        factor = self.rng.choice([1.0, 1.0, 2.0, 5.0])
        step_s = self.speed_s * factor
        slope_s = step_s * self.rng.choice([0.0, 0.02, 0.2])
        owner = min([one.owner for one in self.instances.values()], default=peer) if is_auto else peer
        return SimInstance(f"m-{number}", peer, owner, slots, step_s, slope_s, step_s / 20, is_auto, placed_at=self.now)

    def _begin(self, instance: SimInstance) -> None:
        instance.updated = self.now
        self.instances[instance.name] = instance
        for request in self.homeless:
            self.at(self.now, lambda request=request: self.send(request))  # type: ignore[misc]
        self.homeless.clear()

    def at(self, when: float, action: Callable[[], None]) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (when, self.num_events, action))

    def run(self) -> History:
        end = self._plan_load()
        self.at(0.0, self.tick)
        while self.events and (self.now < end or self.live):
            self.now, _, action = heapq.heappop(self.events)
            if self.now > end + 20_000:
                self.history.problems.append(f"{self.live} requests never ended")
                break
            action()
        self._judge_actions()
        return self.history

    def _plan_load(self) -> float:
        """Schedule phases of constant load, losses and drains; returns the end of the last phase."""
        capacity = sum(
            one.slots / (self.prompt * one.prompt_token_s + self.output * one.step_at(one.slots))
            for one in self.instances.values()
        )
        start, before_per_s = 0.0, 0.0
        for _ in range(self.rng.randint(2, 5)):
            length_s = self.rng.uniform(60, 900)
            per_s = capacity * self.rng.choice([0.02, 0.2, 0.5, 0.8, 1.5])
            if per_s != before_per_s:
                self.changes.append(start)
            before_per_s = per_s
            most = int(min(length_s * per_s, 400))
            when = start
            for _ in range(most):
                when += self.rng.expovariate(per_s)
                if when > start + length_s:
                    break
                request = SimRequest(
                    self.rng.randrange(len(self.entries)),
                    when,
                    max(1, int(self.prompt * self.rng.uniform(0.5, 1.5))),
                    max(1, int(self.rng.expovariate(1 / self.output))),
                )
                self.at(when, lambda request=request: self._arrive(request))  # type: ignore[misc]
            start += length_s
            if most == 400:
                start = when
        for _ in range(self.rng.choice([0, 0, 1, 3])):
            self.at(self.rng.uniform(0, start), self._lose_one)
        if self.rng.random() < 0.3:
            self.at(self.rng.uniform(0, start), self._drain_one)
        return start

    def _arrive(self, request: SimRequest) -> None:
        self.live += 1
        self.send(request)

    def _lose_one(self) -> None:
        """An instance is lost with all that it computes; it comes back on its peer, or the peer is gone."""
        up = sorted(name for name, one in self.instances.items() if one.is_up)
        if not up:
            return
        lost = self.instances[self.rng.choice(up)]
        self.history.losses += 1
        self.changes.append(self.now)
        lost.is_up = False
        lost.version += 1
        orphans = [*lost.running, *lost.waiting]
        lost.running, lost.waiting = [], deque()
        for request in orphans:
            self.at(self.now + DETECT_S, lambda request=request: self.send(request))  # type: ignore[misc]
        if self.rng.random() < 0.7 or len(up) == 1:
            self.at(self.now + RETURN_S, lambda: self._return(lost))
        else:
            del self.instances[lost.name]
            self.dead_peers.add(lost.peer)

    def _return(self, lost: SimInstance) -> None:
        if lost.name in self.instances:
            lost.is_up = True
            self.changes.append(self.now)
            self._begin(lost)

    def _drain_one(self) -> None:
        instance = self.instances[self.rng.choice(sorted(self.instances))]
        instance.is_draining = True
        self.changes.append(self.now)

    # routing

    def send(self, request: SimRequest) -> None:
        """Send a request to the instance that its entry peer chooses."""
        usable = self._usable()
        if not usable:
            self.homeless.append(request)
            return
        job = Job(request.prompt, self._expected_output(request))
        chosen = usable[choose([self._option(one, request.entry) for one in usable], job, self.draws)]
        request.queued_at, request.is_streaming = self.now, False
        chosen.advance(self.now)
        chosen.waiting.append(request)
        self._go_on(chosen)

    def _expected_output(self, request: SimRequest) -> float:
        return request.output if self.knows else self.entries[request.entry].output_tokens(MODEL, 10**6)

    def _option(self, instance: SimInstance, entry: int, there: Sequence[SimRequest] | None = None) -> Option:
        """there: the requests at the instance that count; by default all."""
        counted = [*instance.running, *instance.waiting] if there is None else there
        mine = [one for one in counted if one.entry == entry or self.knows]
        jobs = [self._job(one) for one in mine]
        if self.knows:
            return Option(_true_speed(instance), jobs, 0, instance.slots)
        report = self.reports.get(instance.name, Counter[int]())
        others = sum(count for peer, count in report.items() if peer != entry)
        speed = self.entries[entry].of(instance.name, (str(instance.peer),))
        return Option(speed, jobs, others, instance.slots, 0.0, speed.trust(self.now))

    def _job(self, request: SimRequest) -> Job:
        if self.knows:
            left = request.tokens if request.is_streaming else float(request.output)
        else:
            emitted = int(request.output - request.tokens) if request.is_streaming else 0
            left = self.entries[request.entry].output_tokens(MODEL, 10**6, emitted)
        return Job(0 if request.is_streaming else request.prompt, left)

    def _go_on(self, instance: SimInstance) -> None:
        """After a change: admit requests, and plan the next change of this instance."""
        instance.admit(self.now)
        instance.version += 1
        version = instance.version
        if instance.running:
            self.at(self.now + instance.next_s() + 1e-9, lambda: self._step(instance, version))

    def _step(self, instance: SimInstance, version: int) -> None:
        if version != instance.version:
            return
        instance.advance(self.now)
        for request in list(instance.running):
            if request.prefill_s <= 1e-9 and not request.is_streaming:
                request.prefill_s, request.is_streaming = 0.0, True
                request.first_at = request.first_at or self.now
                self._note_first(instance, request)
            if request.prefill_s <= 0 and request.tokens <= 1e-6:
                instance.running.remove(request)
                self._end(instance, request)
        self._go_on(instance)

    def _note_first(self, instance: SimInstance, request: SimRequest) -> None:
        speed = self._speed(instance, request)
        speed.took_first(request.prompt + request.ahead, self.now - request.turn_at + instance.step_at(1), self.now)

    def _end(self, instance: SimInstance, request: SimRequest) -> None:
        self.live -= 1
        self.history.ttft_s.append(request.ttft_s)
        step_s = instance.step_at(len(instance.running) + 1)
        noisy_s = step_s * max(0.2, self.draws.gauss(1.0, NOISE))
        if request.output > 1:
            self._speed(instance, request).took_step(len(instance.running) + 1, noisy_s, self.now)
        self.entries[request.entry].answered(MODEL, request.output)

    def _speed(self, instance: SimInstance, request: SimRequest) -> Speed:
        return self.entries[request.entry].of(instance.name, (str(instance.peer),))

    # readings and replicas

    def tick(self) -> None:
        """Publish the readings, then let each owner follow its policy."""
        self.reports = {
            name: Counter(request.entry for request in (*one.running, *one.waiting))
            for name, one in self.instances.items()
        }
        for instance in self.instances.values():
            instance.advance(self.now)
        if not self.knows:
            self._move_waiting()
            for peer in sorted({one.owner for one in self.instances.values()}):
                self._follow(peer)
        self.at(self.now + TICK_S, self.tick)

    def _usable(self) -> list[SimInstance]:
        up = [one for _, one in sorted(self.instances.items()) if one.is_up]
        return [one for one in up if not one.is_draining] or up

    def _move_waiting(self) -> None:
        """Let each waiting request move to another instance, as its entry peer does."""
        usable, looks = self._usable(), 0
        for instance in usable:
            for request in list(instance.waiting):
                self._note_idle(request, [one for one in usable if not one.outstanding])
                if (
                    looks >= MOST_LOOKS * TICK_S / LOOK_EVERY_S
                    or request.moves >= MOST_MOVES
                    or self.now < request.look_at
                ):
                    continue
                looks += 1
                request.look_at = self.now + LOOK_AGAIN_S
                others = [one for one in usable if one is not instance]
                ahead = instance.outstanding_before(request)
                options = [
                    self._option(instance, request.entry, ahead),
                    *(self._option(one, request.entry) for one in others),
                ]
                best = better_than(options, 0, Job(request.prompt, self._expected_output(request)))
                if best is not None:
                    request.moves += 1
                    instance.waiting.remove(request)
                    target = others[best - 1]
                    target.advance(self.now)
                    request.queued_at, request.beside_idle_s = self.now, 0.0
                    target.waiting.append(request)
                    self._go_on(target)
                    self.history.moved += 1

    def _note_idle(self, request: SimRequest, idle: list[SimInstance]) -> None:
        """Nobody waits beside an idle instance for much longer than it would need for the whole request."""
        if request.idle not in {one.name for one in idle}:
            request.idle, request.beside_idle_s = (idle[0].name, 0.0) if idle else ("", 0.0)
            return
        request.beside_idle_s += TICK_S
        needed_s = self.instances[request.idle].service_s(request.prompt, max(request.output, self.output))
        if request.beside_idle_s > 3.0 + 2.0 * needed_s:
            self.history.problems.append(
                f"at {self.now:.0f} s a request waited for {request.beside_idle_s:.0f} s beside {request.idle}, which "
                f"was idle and needed {needed_s:.1f} s for it"
            )
            request.beside_idle_s = 0.0

    def _follow(self, peer: int) -> None:
        ready = [one for _, one in sorted(self.instances.items()) if one.is_up]
        use = ModelLoad(
            [
                ReplicaUse(one.name, len(one.waiting), one.outstanding, one.slots, one.is_auto, one.owner == peer)
                for one in ready
            ],
            may_place=peer == min((one.owner for one in ready), default=-1),
            is_changing=self.placing or any(not one.is_up for one in self.instances.values()),
            max_instances=self.num_peers - len(self.dead_peers),
        )
        policy = self.policies[peer]
        action = policy.step(use, self.now)
        if action is ReplicaAction.PLACE:
            self._place(policy, peer)
        elif action is ReplicaAction.GIVE_BACK and use.last_auto is not None:
            self._give_back(use.last_auto.instance_id, peer)

    def _place(self, policy: ReplicaPolicy, decider: int) -> None:
        if self.placing:
            self.history.problems.append(f"two instances are placed at once at {self.now:.0f} s")
        if not self.free_peers or self.rng.random() < 0.1:
            policy.failed(self.now)
            return
        self.placing = True
        self.at(self.now + self.rng.uniform(1, 20), lambda: self._placed(policy, decider))

    def _placed(self, policy: ReplicaPolicy, decider: int) -> None:
        self.placing = False
        if not self.instances:
            return
        policy.placed()
        self._begin(self._new_instance(self.slots, is_auto=True))
        self.actions.append((self.now, "place", decider))
        self.history.placed += 1

    def _give_back(self, name: str, decider: int) -> None:
        instance = self.instances.pop(name)
        if not instance.is_auto or not self.instances:
            self.history.problems.append(f"{name} was given back, which nobody may do")
        if self.now - instance.placed_at < IDLE_S:
            self.history.problems.append(f"{name} was given back {self.now - instance.placed_at:.0f} s after it came")
        self.free_peers.add(instance.peer)
        self.actions.append((self.now, "give back", decider))
        self.history.given_back += 1

    def _judge_actions(self) -> None:
        """Nothing oscillates, whatever the requests are: no placement within HOLD_S of a give-back, and a peer that had
        to place an instance again soon waits twice as long until it gives one back. Random arrivals of the same rate
        may look like another load for minutes, so reversals are only counted."""
        idle_s: dict[int, float] = {}
        last: dict[int, tuple[float, str]] = {}
        for (before, first, _), (after, second, peer) in itertools.pairwise([(0.0, "", -1), *self.actions]):
            due_s = idle_s.get(peer, IDLE_S)
            own_before, own_first = last.get(peer, (0.0, ""))
            last[peer] = (after, second)
            if second == "give back" and after - before < due_s:
                self.history.problems.append(f"gave back {after - before:.0f} s after a change, not {due_s:.0f} s")
            if (own_first, second) == ("give back", "place"):
                idle_s[peer] = min(2 * due_s, LAST_IDLE_S) if after - own_before < due_s else IDLE_S
            if (first, second) == ("give back", "place"):
                if after - before < HOLD_S:
                    self.history.problems.append(f"placed {after - before:.0f} s after a give-back")
                if not any(before - IDLE_S < change <= after for change in self.changes):
                    self.history.reversals += 1


def _true_speed(instance: SimInstance) -> Speed:
    speed = Speed()
    speed.took_step(1, instance.step_at(1), 0.0)
    speed.took_step(instance.slots, instance.step_at(instance.slots), 0.0)
    for _ in range(40):
        speed.took_step(1, instance.step_at(1), 0.0)
        speed.took_step(instance.slots, instance.step_at(instance.slots), 0.0)
    speed.took_first(1000, 1000 * instance.prompt_token_s + instance.step_at(1), 0.0)
    return speed


def play(seed: int) -> History:
    """Play the history with this seed."""
    return World(seed).run()
