"""Who is alive, by the SWIM protocol with the local health of Lifeguard. Pure: the caller brings time and chance.

Das, Gupta, Motivala: SWIM (DSN 2002). Dadgar, Phillips, Currey: Lifeguard (DSN-W 2018).

       join / newer life           failed probe, or news of it
    ------------------->  ALIVE  ------------------------------>  SUSPECT
                            ^  ^------- newer life (refuted) -------  |
                newer life  |                                         |  suspicion timeout, or news of it
                            +------------- DEAD or LEFT  <------------+

A peer whose machine refuses connections is dead without a suspicion (`failed`).

A death that others tell of a peer that is ALIVE here is *doubted*: the peer is a suspect from then on, and their
verdict is passed on. If it does not answer here either, it is dead; if it does, it hears of the verdict and can rise
above it. Otherwise each half of a mesh that was split would believe the other about its own members.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from exo_mesh.membership.detector import Timing

ALL_PROBED = 16
"""In a mesh of up to this many others everybody probes everybody each period: 16 calls a second are nothing, and a
death is seen sooner. In a larger one each peer probes one, in a shuffled round."""

NUM_HELPERS = 3
"""Peers that are asked to probe for us (k in the paper)."""

MAX_SUSPECTS_PROBED = 3
"""Besides the one of the round: a suspect is probed each period, so that it hears of the suspicion soon."""

NUM_CONFIRMATIONS = 3
"""Peers besides the first accuser that could not reach a suspect either, after which its time is the shortest (K in
Lifeguard)."""

MAX_ACCUSERS = 1 + NUM_CONFIRMATIONS

PATIENCE = 2.0
"""A suspect whom nobody else accuses has this many times the time of one whom NUM_CONFIRMATIONS others accuse."""

MAX_HEALTH = 8
"""As in Lifeguard: the worst local health stretches the period and the patience of a probe ninefold."""

MAX_STRETCH = 4
"""Bad local health stretches the time of a suspect up to this much: enough for no false verdict in simulated meshes
whose messages take up to 2 s (`tools.simulate.mesh.starve`), and a death is still seen within half a minute."""

PROMPT, LATE = 0.25, 0.5
"""Shares of the time for an answer: one within PROMPT of the shortest time makes local health better, one after LATE of
the time that it had makes it worse. A LAN takes 3 ms, and Wi-Fi 100, of the 750 that are the shortest."""

MAX_GONE = 1024
GONE_S = 60.0
"""How long, and how many, verdicts are remembered: far longer than old news of that peer can be on its way."""


class SwimState(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


GONE = (SwimState.DEAD, SwimState.LEFT)


class Life(NamedTuple):
    """incarnation: starts of the process. refutation: verdicts that this start has answered."""

    incarnation: int
    refutation: int = 0


class Update(NamedTuple):
    """News of a peer. accusers: of a suspect, peers that could not reach it; at most MAX_ACCUSERS."""

    peer_id: str
    state: SwimState
    life: Life
    accusers: tuple[str, ...] = ()


_TAKEN_IF: dict[tuple[SwimState, SwimState], Callable[[Life, Life], bool]] = {
    (SwimState.ALIVE, SwimState.ALIVE): operator.gt,
    (SwimState.ALIVE, SwimState.SUSPECT): operator.ge,
    (SwimState.ALIVE, SwimState.DEAD): operator.ge,
    (SwimState.ALIVE, SwimState.LEFT): operator.ge,
    (SwimState.SUSPECT, SwimState.ALIVE): operator.gt,
    (SwimState.SUSPECT, SwimState.SUSPECT): operator.gt,
    (SwimState.SUSPECT, SwimState.DEAD): operator.ge,
    (SwimState.SUSPECT, SwimState.LEFT): operator.ge,
    (SwimState.DEAD, SwimState.ALIVE): operator.gt,
    (SwimState.DEAD, SwimState.DEAD): operator.gt,
    (SwimState.DEAD, SwimState.LEFT): operator.gt,
    (SwimState.LEFT, SwimState.ALIVE): operator.gt,
    (SwimState.LEFT, SwimState.DEAD): operator.gt,
    (SwimState.LEFT, SwimState.LEFT): operator.gt,
}
"""(held, told): news is taken if taken_if(its life, the held life). What is not here changes nothing."""


def is_news(held_state: SwimState, held_life: Life, told: Update) -> bool:
    """Does `told` change what is held of that peer?"""
    taken_if = _TAKEN_IF.get((held_state, told.state))
    return taken_if is not None and taken_if(told.life, held_life)


def suspicion_s(base_s: float, num_others: int, num_able: int, num_accusers: int) -> float:
    """How long a suspect has to refute when `num_accusers`, at least 1, could not reach it.

    At the least `base_s` in a mesh of up to 256, then with log2 of its size, as gossip takes that many rounds to reach
    it and to come back. PATIENCE times as long, and more from 16 on, while only one accuses it; in between
    Max - (Max - Min) log(C + 1) / log(K + 1) after C of K confirmations (Lifeguard, LHA-Suspicion).

    num_able: others that are not suspects themselves; nobody else can confirm it.
    """
    scale = math.log2(max(2, num_others + 1)) / 4
    shortest_s = base_s * max(1.0, scale / 2)
    longest_s = PATIENCE * base_s * max(1.0, scale)
    needed = min(NUM_CONFIRMATIONS, num_able)
    if needed <= 0:
        return shortest_s
    share = math.log(min(num_accusers - 1, needed) + 1) / math.log(needed + 1)
    return longest_s - (longest_s - shortest_s) * share


@dataclass(slots=True)
class SwimMember:
    """What is held of one other peer. since: when it came to this state (a suspect: when its time began).
    doubted: a suspect of whom others say that it is dead, and which was alive here."""

    state: SwimState
    life: Life
    since: float
    accusers: tuple[str, ...] = ()
    doubted: bool = False

    @property
    def told(self) -> SwimState:
        """The state that is passed on."""
        return SwimState.DEAD if self.doubted else self.state


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be done now: peers to probe, and verdicts that were just reached."""

    probes: list[str] = field(default_factory=list)
    dead: list[Update] = field(default_factory=list)


class Swim:
    """One node's knowledge of the others, and when to ask whom. Every method may be called at any time."""

    def __init__(self, own_id: str, incarnation: int, timing: Timing, rng: random.Random) -> None:
        self.own_id = own_id
        self.life = Life(incarnation)
        self.health = 0
        self._timing = timing
        self._rng = rng
        self._members: dict[str, SwimMember] = {}
        self._suspects: dict[str, SwimMember] = {}
        self._round: list[str] = []
        self._turns = 0
        self._probe_at = -math.inf
        self._seen_at: float | None = None
        self._woke_at = -math.inf

    def member(self, peer_id: str) -> SwimMember | None:
        return self._members.get(peer_id)

    def update_of(self, peer_id: str) -> Update | None:
        """What is passed on of a peer."""
        held = self._members.get(peer_id)
        return None if held is None else Update(peer_id, held.told, held.life, held.accusers)

    def updates(self) -> list[Update]:
        """All that is passed on, the gone ones included."""
        return [Update(peer_id, held.told, held.life, held.accusers) for peer_id, held in self._members.items()]

    @property
    def living(self) -> list[str]:
        """The others that are alive or suspect."""
        return [peer_id for peer_id, held in self._members.items() if held.state not in GONE]

    @property
    def probe_timeout_s(self) -> float:
        return self._timing.probe_s * (1 + self.health)

    def learn(self, told: Update, now: float) -> bool:
        """Take news of another peer; True if it was news, also if only who else accuses a suspect."""
        held = self._members.get(told.peer_id)
        is_other_start = held is None or told.life.incarnation != held.life.incarnation
        if told.peer_id == self.own_id or (told.state is SwimState.SUSPECT and is_other_start):
            return False  # whoever has not been admitted in this start is not probed here either
        if held is None:
            self._hold(told.peer_id, SwimMember(told.state, told.life, now))
            return True
        is_known = held.doubted and told.state is SwimState.DEAD and told.life == held.life
        if is_known or not is_news(held.state, held.life, told):
            return self._confirm(held, told)
        doubted = (
            told.state is SwimState.DEAD and not is_other_start and (held.state is SwimState.ALIVE or held.doubted)
        )
        state = SwimState.SUSPECT if doubted else told.state
        self._hold(told.peer_id, SwimMember(state, told.life, now, told.accusers, doubted))
        return True

    def conclude(self, peer_id: str, life: Life, now: float) -> Update:
        """This node itself knows that a peer is dead: no doubt is left."""
        self._hold(peer_id, SwimMember(SwimState.DEAD, life, now))
        return Update(peer_id, SwimState.DEAD, life)

    def _hold(self, peer_id: str, member: SwimMember) -> None:
        self._members.pop(peer_id, None)  # the gone ones in the order of their going
        self._members[peer_id] = member
        self._suspects.pop(peer_id, None)
        if member.state is SwimState.SUSPECT:
            self._suspects[peer_id] = member
        if member.state in GONE:
            self._forget_oldest(member.since)

    def _confirm(self, held: SwimMember, told: Update) -> bool:
        """Count who else could not reach a suspect; True if somebody was new."""
        if not (held.state is told.state is SwimState.SUSPECT and held.life == told.life):
            return False
        new = [one for one in dict.fromkeys(told.accusers) if one not in held.accusers]
        new = new[: MAX_ACCUSERS - len(held.accusers)]
        held.accusers = (*held.accusers, *new)
        return bool(new)

    def is_accused(self, told: Update) -> bool:
        """Is this a verdict about ourselves, in this life, that must be answered?"""
        return told.peer_id == self.own_id and told.state is not SwimState.ALIVE and told.life >= self.life

    def refute(self, told: Update) -> Update:
        """Rise above a verdict about ourselves; answers what to tell the others. Being accused is a sign of ill
        health: one's answers come late."""
        if self.is_accused(told):
            self.life = Life(self.life.incarnation, told.life.refutation + 1)
            self._worse()
        return Update(self.own_id, SwimState.ALIVE, self.life)

    def acked(self, peer_id: str, now: float, took_s: float = 0.0) -> None:
        """A probe of this peer was answered. If others hold it for dead, it was told so, and gets time to answer.

        took_s: since the probe was sent, also where only a helper got an answer. One that nearly came too late shows
        that this node, or what it reaches others by, is slow: then the next ones get more time.
        """
        self._notice_stall(now)
        if took_s <= self._timing.probe_s * PROMPT:
            self.health = max(0, self.health - 1)
        elif took_s > self.probe_timeout_s * LATE:
            self._worse()
        held = self._members.get(peer_id)
        if held is not None and held.doubted:
            held.since = now

    def failed(
        self, peer_id: str, began: float, now: float, *, asked: int, answered: int, is_refused: bool = False
    ) -> Update | None:
        """A probe was answered neither directly nor through the helpers that were asked; answers what is new by that: a
        suspicion, that it is confirmed, or a death, if others hold it for dead already.

        answered: helpers that could not reach it either, but said so. If none of several did, the fault may be here.
        is_refused: its machine answered, here and at a helper if there is any, that nobody listens: then it is dead.
        A probe during which this node stood still proves nothing.
        """
        self._notice_stall(now)
        if asked and not answered:
            self._worse()
        held = self._members.get(peer_id)
        if held is None or held.state in GONE or began < self._woke_at:
            return None
        if held.doubted or is_refused:
            return self.conclude(peer_id, held.life, now)
        suspicion = Update(peer_id, SwimState.SUSPECT, held.life, (self.own_id,))
        return self.update_of(peer_id) if self.learn(suspicion, now) else None

    def helpers(self, peer_id: str) -> list[str]:
        """Whom to ask to probe a peer in our place."""
        others = [one for one, held in self._members.items() if held.state is SwimState.ALIVE and one != peer_id]
        return self._rng.sample(others, min(NUM_HELPERS, len(others)))

    def tick(self, now: float) -> Step:
        """Call this several times a period; a pause much longer than that means that this node stood still."""
        self._notice_stall(now)
        dead = [self.conclude(peer_id, self._members[peer_id].life, now) for peer_id in self._overdue(now)]
        if now < self._probe_at:
            return Step([], dead)
        self._probe_at = now + self._timing.period_s * (1 + self.health)
        return Step(self._to_probe(), dead)

    def _overdue(self, now: float) -> list[str]:
        """Suspects that have had their time."""
        if not self._suspects:
            return []
        held_all = self._members.values()
        num_others = sum(1 for held in held_all if held.state not in GONE)
        num_able = sum(1 for held in held_all if held.state is SwimState.ALIVE or held.doubted)
        base_s = self._timing.suspicion_s * min(1 + self.health, MAX_STRETCH)
        return [
            peer_id
            for peer_id, held in self._suspects.items()
            if now - held.since >= suspicion_s(base_s, num_others, num_able, max(1, len(held.accusers)))
        ]

    def _to_probe(self) -> list[str]:
        """All of a small mesh. Of a larger one, in turn the next by id in the ring of the living, so that each is asked
        by somebody every second period, and the next of a shuffled round; and some suspects."""
        living = self.living
        if len(living) <= ALL_PROBED:
            return living
        self._turns += 1
        chosen = self._rng.sample(list(self._suspects), min(MAX_SUSPECTS_PROBED, len(self._suspects)))
        if self._turns % 2:
            after = [peer_id for peer_id in living if peer_id > self.own_id]
            peer_id = min(after or living)
            return [*chosen, *([] if peer_id in chosen else [peer_id])]
        while True:
            if not self._round:
                self._round = living
                self._rng.shuffle(self._round)
            peer_id = self._round.pop()
            held = self._members.get(peer_id)
            if held is not None and held.state not in GONE:
                return [*chosen, *([] if peer_id in chosen else [peer_id])]

    def _notice_stall(self, now: float) -> None:
        """After standing still, everything must be asked again: all suspects get their whole time once more."""
        if self._seen_at is not None and now - self._seen_at > self._timing.stall_s:
            self._woke_at = now
            self._worse()
            for held in self._suspects.values():
                held.since = now
        self._seen_at = now

    def _worse(self) -> None:
        self.health = min(MAX_HEALTH, self.health + 1)

    def _forget_oldest(self, now: float) -> None:
        gone = [peer_id for peer_id, held in self._members.items() if held.state in GONE]
        for index, peer_id in enumerate(gone):
            if now - self._members[peer_id].since > GONE_S or len(gone) - index > MAX_GONE:
                del self._members[peer_id]
