"""Messages to the callers of a driver: collected while it works, and delivered after its next frames have left."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.replay import Kept
from exo_mesh.domain.request import GenerateRequest, TokenEvent
from exo_mesh.errors import MeshError
from exo_mesh.rings.runner.generation import Drawn, Generation, error_events, prompt_events, trace_events, write_tokens
from exo_mesh.rings.runner.mailbox import Mailbox, Write
from exo_mesh.rings.runner.replays import replay_messages
from exo_mesh.rings.runner.sampling.prompt_logprobs import pieces
from exo_mesh.wire.plan_codec import ballot_to_proto
from exo_mesh.wire.proto.driver_pb2 import GenerateEvents


class Callers:
    """Collects updates for the mailboxes of callers. Each update carries the ballot that was in force when it was
    added."""

    def __init__(self, ballot: Ballot) -> None:
        self._ballot = ballot_to_proto(ballot)
        self._updates: list[tuple[Mailbox, Write]] = []

    def change(self, ballot: Ballot) -> None:
        """Send further messages under another ballot."""
        self._ballot = ballot_to_proto(ballot)

    def deliver(self) -> None:
        """Deliver all updates since the last call."""
        for mailbox, write in self._updates:
            mailbox.post(write)
        self._updates.clear()

    def tell(self, generation: Generation, make: Callable[..., GenerateEvents], *arguments: object) -> None:
        """Add the message that `make` makes of the ballot and the arguments."""
        self._updates.append((generation.mailbox, partial(_merge, partial(make, self._ballot, *arguments))))

    def tell_tokens(self, generation: Generation, index: int, drawn: Drawn) -> None:
        """Add the tokens of a row. index: of the first one."""
        self._updates.append((generation.mailbox, partial(write_tokens, self._ballot, index, drawn)))

    def tell_laps(self, generation: Generation, least: int = 1) -> None:
        """Add the laps of a traced request that were not sent yet, if there are at least `least`."""
        if len(generation.laps) >= least:
            self.tell(generation, trace_events, generation.take_laps())

    def fail(self, generation: Generation, error: MeshError) -> None:
        """Add the message that ends a request that failed."""
        self.tell(generation, error_events, error)

    def replay(self, mailbox: Mailbox, request: GenerateRequest, kept: Kept, events: list[TokenEvent]) -> None:
        """Add a kept answer: the log-probabilities of the prompt, if the request wants them, and the events."""
        for piece in pieces(kept.prompt if request.num_scores else ()):
            self._updates.append((mailbox, partial(_merge, partial(prompt_events, self._ballot, piece))))
        for replayed in replay_messages(self._ballot, events):
            self._updates.append((mailbox, partial(_merge, partial(_the, replayed))))


def _merge(make: Callable[[], GenerateEvents], message: GenerateEvents) -> None:
    """Make a message and add it to another one."""
    message.MergeFrom(make())


def _the(message: GenerateEvents) -> GenerateEvents:
    """Returns a message that is already made."""
    return message
