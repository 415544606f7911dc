"""Updates to the callers of a driver: collected while it works, and delivered after its next frames have left."""

from __future__ import annotations

import time

from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.replay import Kept
from exo_mesh.domain.request import GenerateRequest, TokenEvent
from exo_mesh.rings.runner.generation import Generation
from exo_mesh.rings.runner.mailbox import FLUSH_EVERY_S, CallerUpdate, DriverNews, Laps, Mailbox, may_wait
from exo_mesh.rings.runner.replays import replayed
from exo_mesh.rings.runner.sampling.prompt_logprobs import pieces


class Callers:
    """Collects updates for the mailboxes of callers. Each update carries the ballot that was in force when it was
    added."""

    def __init__(self, ballot: Ballot) -> None:
        self._ballot = ballot
        self._updates: list[tuple[Mailbox, CallerUpdate]] = []
        self._is_urgent = False
        self._delivered_at = float("-inf")

    def change(self, ballot: Ballot) -> None:
        """Send further updates under another ballot."""
        self._ballot = ballot

    def deliver(self) -> None:
        """Deliver all updates since the last call. On the event loop."""
        if self._updates:
            self._delivered_at = time.monotonic()
        for mailbox, update in self._updates:
            mailbox.post(update)
        self._updates.clear()
        self._is_urgent = False

    def is_due(self, now: float, *, is_idle: bool) -> bool:
        """Whether to deliver now (seconds of `time.monotonic`), and not with later updates: see FLUSH_EVERY_S. is_idle:
        no frame is being computed, whose updates would come."""
        return bool(self._updates) and (is_idle or self._is_urgent or now - self._delivered_at >= FLUSH_EVERY_S)

    def tell(self, generation: Generation, news: DriverNews, index: int = 0) -> None:
        """Add an update. index: of the first token of Drawn."""
        self._updates.append((generation.mailbox, CallerUpdate(self._ballot, news, index)))
        self._is_urgent = self._is_urgent or not (index and may_wait(news))

    def tell_laps(self, generation: Generation, least: int = 1) -> None:
        """Add the laps of a traced request that were not sent yet, if there are at least `least`."""
        if len(generation.laps) >= least:
            self.tell(generation, Laps(generation.take_laps()))

    def replay(self, mailbox: Mailbox, request: GenerateRequest, kept: Kept, events: list[TokenEvent]) -> None:
        """Add a kept answer: the log-probabilities of the prompt, if the request wants them, and the events."""
        prompt = kept.prompt if request.num_scores else ()
        news: list[DriverNews] = [*pieces(prompt), *replayed(events)]
        self._updates += [(mailbox, CallerUpdate(self._ballot, one)) for one in news]
        self._is_urgent = True
