"""Decides which peers are alive, by the SWIM protocol with Lifeguard's local health. Pure: the caller passes time and
randomness.

Das, Gupta, Motivala: SWIM (DSN 2002). Dadgar, Phillips, Currey: Lifeguard (DSN-W 2018).

       join / newer life           failed probe, or news of it
    ------------------->  ALIVE  ------------------------------>  SUSPECT
                            ^  ^------- newer life (refuted) -------  |
                newer life  |                                         |  suspicion timeout, or news of it
                            +------------- DEAD or LEFT  <------------+

A peer whose machine refuses connections is dead without a suspicion (`failed`).

If others report the death of a peer that is ALIVE here, the report is *doubted*: the peer becomes a suspect here, and
the others' verdict is passed on. If it does not answer here either, it is dead. If it does answer, it receives the
verdict and can refute it. Without this rule, each half of a mesh that was split would believe the other half about its
own members.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec

from exo_mesh.domain.fields import Cut, Flat, Only, Size
from exo_mesh.mesh.membership.detector import Timing

SMALL = 16
"""In a mesh of up to this many others, a peer probes the next peer by id in each period, sends its news to all others,
and probes a suspect at once when another peer reports it. In a larger mesh each peer probes one other in a period."""

NUM_HELPERS = 3
"""Peers that are asked to probe on behalf of this node (k in the paper)."""

MAX_SUSPECTS_PROBED = 3
"""Suspects probed each period in addition to the regular peer, so that a suspect receives the suspicion soon."""

NUM_CONFIRMATIONS = 3
"""Peers, besides the first accuser, whose failed probes reduce a suspect's time to the shortest (K in Lifeguard)."""

MAX_ACCUSERS = 1 + NUM_CONFIRMATIONS

PATIENCE = 2.0
"""A suspect with one accuser has this many times as long as one with NUM_CONFIRMATIONS further accusers."""

MAX_HEALTH = 8
"""As in Lifeguard: the worst local health stretches the period and the timeout of probes ninefold."""

MAX_STRETCH = 4
"""Most by which bad local health stretches the time of a suspect: enough for no false verdict in simulated meshes whose
messages take up to 2 s (`tools.simulate.mesh.starve`), while a death is still detected within half a minute."""

PROMPT, LATE = 0.25, 0.5
"""Shares of the timeout. An answer within PROMPT of the shortest timeout improves local health; one after LATE of its
own timeout worsens it. Of the shortest timeout, 750 ms, a LAN takes 3 ms and Wi-Fi 100 ms."""

MAX_GONE = 1024
GONE_S = 60.0
"""How long, and how many, verdicts are remembered: far longer than outdated news of a peer can circulate."""


class SwimState(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


GONE = (SwimState.DEAD, SwimState.LEFT)


class Life(NamedTuple):
    """The age of a peer's state. incarnation: starts of the process. refutation: verdicts that this start has
    refuted."""

    incarnation: int
    refutation: int = 0


MAX_ID = 64
PeerId = Annotated[str, Size(MAX_ID, least=1)]


def _can_be_id(text: str) -> bool:
    return 0 < len(text) <= MAX_ID


class Update(NamedTuple):
    """News of a peer. accusers: peers that could not reach a suspect; at most MAX_ACCUSERS."""

    peer_id: PeerId
    state: SwimState
    life: Annotated[Life, Flat()]
    accusers: Annotated[tuple[str, ...], Cut(MAX_ACCUSERS), Only(_can_be_id)] = ()


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
"""By (held state, state in the update): the update is accepted if taken_if(its life, held life). A missing pair changes
nothing."""


def is_news(held_state: SwimState, held_life: Life, update: Update) -> bool:
    """Whether the update changes the state held of its peer."""
    taken_if = _TAKEN_IF.get((held_state, update.state))
    return taken_if is not None and taken_if(update.life, held_life)


def suspicion_s(base_s: float, num_others: int, num_able: int, num_accusers: int) -> float:
    """How long a suspect has to refute when `num_accusers` peers, at least 1, could not reach it.

    The shortest time is `base_s` in a mesh of up to 256 peers; in a larger one it grows with log2 of the size, because
    gossip takes that many rounds to reach the suspect and to return. With one accuser the time is PATIENCE times as
    long, and longer still from 16 peers on. In between it is Max - (Max - Min) log(C + 1) / log(K + 1) after C of K
    confirmations (Lifeguard, LHA-Suspicion).

    num_able: others that are not suspects themselves; only they can confirm the suspicion.
    """
    scale = math.log2(max(2, num_others + 1)) / 4
    shortest_s = base_s * max(1.0, scale / 2)
    longest_s = PATIENCE * base_s * max(1.0, scale)
    needed = min(NUM_CONFIRMATIONS, num_able)
    if needed <= 0:
        return shortest_s
    share = math.log(min(num_accusers - 1, needed) + 1) / math.log(needed + 1)
    return longest_s - (longest_s - shortest_s) * share


class SwimMember(msgspec.Struct):
    """State held of one other peer. since: when it entered this state, for a suspect when its time to refute began.
    doubted: a suspect that others report as dead and that was alive here."""

    state: SwimState
    life: Life
    since: float
    accusers: tuple[str, ...] = ()
    doubted: bool = False

    @property
    def published(self) -> SwimState:
        """The state that is gossiped."""
        return SwimState.DEAD if self.doubted else self.state


class Step(msgspec.Struct, frozen=True):
    """Actions that are due: peers to probe, and verdicts that were just reached. next_at: when `tick` must be called
    again at the latest."""

    probes: list[str] = msgspec.field(default_factory=list)
    dead: list[Update] = msgspec.field(default_factory=list)
    next_at: float = 0.0


class Swim:
    """One node's knowledge of the other peers, and its schedule of probes. Every method may be called at any time."""

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
        self._due_at = -math.inf
        self._fresh_suspects: list[str] = []
        """Suspects that other peers reported since the last tick."""
        self._woke_at = -math.inf

    def member(self, peer_id: str) -> SwimMember | None:
        return self._members.get(peer_id)

    def update_of(self, peer_id: str) -> Update | None:
        """The update that is gossiped about a peer."""
        held = self._members.get(peer_id)
        return None if held is None else Update(peer_id, held.published, held.life, held.accusers)

    def updates(self) -> list[Update]:
        """All gossiped updates, also of gone peers."""
        return [Update(peer_id, held.published, held.life, held.accusers) for peer_id, held in self._members.items()]

    @property
    def living(self) -> list[str]:
        """The other peers that are alive or suspect."""
        return [peer_id for peer_id, held in self._members.items() if held.state not in GONE]

    @property
    def probe_timeout_s(self) -> float:
        return self._timing.probe_s * (1 + self.health)

    def learn(self, update: Update, now: float) -> bool:
        """Process an update about another peer; True if it was news, even if only a new accuser of a suspect."""
        held = self._members.get(update.peer_id)
        is_other_start = held is None or update.life.incarnation != held.life.incarnation
        if update.peer_id == self.own_id or (update.state is SwimState.SUSPECT and is_other_start):
            return False  # a peer not admitted in this start is not probed here
        if held is None:
            self._hold(update.peer_id, SwimMember(update.state, update.life, now))
            return True
        is_known = held.doubted and update.state is SwimState.DEAD and update.life == held.life
        if is_known or not is_news(held.state, held.life, update):
            return self._confirm(held, update)
        is_alive_here = not is_other_start and (held.state is SwimState.ALIVE or held.doubted)
        doubted = update.state is SwimState.DEAD and is_alive_here
        state = SwimState.SUSPECT if doubted else update.state
        self._hold(update.peer_id, SwimMember(state, update.life, now, update.accusers, doubted))
        if state is SwimState.SUSPECT and self.own_id not in update.accusers:
            self._fresh_suspects.append(update.peer_id)
        return True

    def conclude(self, peer_id: str, life: Life, now: float) -> Update:
        """Record that this node itself knows that a peer is dead, which leaves no doubt."""
        self._hold(peer_id, SwimMember(SwimState.DEAD, life, now))
        return Update(peer_id, SwimState.DEAD, life)

    def _hold(self, peer_id: str, member: SwimMember) -> None:
        self._members.pop(peer_id, None)  # keeps gone peers in the order in which they went
        self._members[peer_id] = member
        self._suspects.pop(peer_id, None)
        if member.state is SwimState.SUSPECT:
            self._suspects[peer_id] = member
        if member.state in GONE:
            self._forget_oldest(member.since)

    def _confirm(self, held: SwimMember, update: Update) -> bool:
        """Count further peers that could not reach a suspect; True if one of them was new."""
        if not (held.state is update.state is SwimState.SUSPECT and held.life == update.life):
            return False
        new = [one for one in dict.fromkeys(update.accusers) if one not in held.accusers]
        new = new[: MAX_ACCUSERS - len(held.accusers)]
        held.accusers = (*held.accusers, *new)
        return bool(new)

    def is_accused(self, update: Update) -> bool:
        """Whether the update is a verdict against this node in its present life, which must be refuted."""
        return update.peer_id == self.own_id and update.state is not SwimState.ALIVE and update.life >= self.life

    def refute(self, update: Update) -> Update:
        """Refute a verdict against this node. Returns the update to publish. Being accused worsens local health,
        because it means that this node's answers come late."""
        if self.is_accused(update):
            self.life = Life(self.life.incarnation, update.life.refutation + 1)
            self._worse()
        return Update(self.own_id, SwimState.ALIVE, self.life)

    def acked(self, peer_id: str, now: float, took_s: float = 0.0) -> None:
        """Record an answered probe. If others consider the peer dead, the probe carried that verdict, and the peer gets
        time to refute it.

        took_s: since the probe was sent, even if only a helper got the answer. An answer shortly before the timeout
        shows that this node or its network is slow, so later probes get more time.
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
        self,
        peer_id: str,
        began: float,
        now: float,
        *,
        asked: int,
        answered: Sequence[str] = (),
        is_refused: bool = False,
    ) -> Update | None:
        """Record a probe that was answered neither directly nor through the helpers. Returns the update that results,
        or None: a suspicion, its confirmation, or a death if others consider the peer dead already.

        asked: number of helpers. answered: ids of the helpers that answered that they could not reach the peer either;
        they confirm the suspicion. If several were asked and none answered, the fault may be on this node. is_refused:
        the peer's machine refused connections, here and at a helper if there is any, so the peer is dead. A probe
        during which this node was suspended proves nothing.
        """
        self._notice_stall(now)
        if asked and not answered:
            self._worse()
        held = self._members.get(peer_id)
        longest_s = 2 * self.probe_timeout_s + self._timing.stall_s
        if held is None or held.state in GONE or began < self._woke_at or now - began > longest_s:
            return None
        if held.doubted or is_refused:
            return self.conclude(peer_id, held.life, now)
        suspicion = Update(peer_id, SwimState.SUSPECT, held.life, (self.own_id, *answered)[:MAX_ACCUSERS])
        return self.update_of(peer_id) if self.learn(suspicion, now) else None

    def helpers(self, peer_id: str) -> list[str]:
        """Random peers to ask to probe a peer on behalf of this node."""
        others = [one for one, held in self._members.items() if held.state is SwimState.ALIVE and one != peer_id]
        return self._rng.sample(others, min(NUM_HELPERS, len(others)))

    def tick(self, now: float, close: Callable[[], Iterable[str]] = tuple) -> Step:
        """Do the due work. Call this by Step.next_at and after news; a much later call means that this node was
        suspended. close: returns the peers that this node depends on, which are probed each period."""
        self._notice_stall(now)
        dead = [self.conclude(peer_id, self._members[peer_id].life, now) for peer_id in self._overdue(now)]
        if now < self._probe_at:
            probes = self._reported_suspects()
        else:
            self._probe_at = now + self._timing.period_s * (1 + self.health)
            probes = self._to_probe(close())
        self._fresh_suspects.clear()
        self._due_at = min(self._probe_at, now + self._timing.period_s / 4) if self._suspects else self._probe_at
        return Step(probes, dead, self._due_at)

    def _reported_suspects(self) -> list[str]:
        """In a small mesh a reported suspect is probed at once: the sooner others confirm the suspicion, the sooner it
        ends. In a larger mesh that would be too many probes of one peer at a time."""
        if len(self.living) > SMALL:
            return []
        return [peer_id for peer_id in dict.fromkeys(self._fresh_suspects) if peer_id in self._suspects]

    def _overdue(self, now: float) -> list[str]:
        """Suspects whose time to refute has ended."""
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

    def _to_probe(self, close: Iterable[str]) -> list[str]:
        """The peers to probe now: some suspects, the close ones, and alternately the next peer by id in the ring of
        living peers and the next of a shuffled round. In a small mesh the next peer by id is probed in each period, so
        that each peer is probed by some other peer in each period."""
        living = self.living
        if not living:
            return []
        self._turns += 1
        chosen = self._rng.sample(list(self._suspects), min(MAX_SUSPECTS_PROBED, len(self._suspects)))
        chosen += [peer_id for peer_id in close if self._is_living(peer_id)]
        if self._turns % 2 or len(living) <= SMALL:
            chosen.append(min([peer_id for peer_id in living if peer_id > self.own_id] or living))
        if not self._turns % 2:
            chosen.append(self._next_of_round(living))
        return list(dict.fromkeys(chosen))

    def _next_of_round(self, living: list[str]) -> str:
        while True:
            if not self._round:
                self._round = list(living)
                self._rng.shuffle(self._round)
            peer_id = self._round.pop()
            if self._is_living(peer_id):
                return peer_id

    def _is_living(self, peer_id: str) -> bool:
        held = self._members.get(peer_id)
        return held is not None and held.state not in GONE

    def _notice_stall(self, now: float) -> None:
        """Detect that this node was suspended; all suspects then get their whole time again, because nothing heard
        before counts."""
        if self._seen_at is not None and now - max(self._seen_at, self._due_at) > self._timing.stall_s:
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
