"""One request inside the driver: its sequence, its sampler, its output so far, and what its caller is told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exo_mesh.domain.request import FinishReason, GenerateRequest, TokenLogprob
from exo_mesh.errors import MeshError
from exo_mesh.proto import driver_pb2 as pb
from exo_mesh.proto import plan_pb2
from exo_mesh.runner.mailbox import Mailbox
from exo_mesh.runner.sampler import Sampler
from exo_mesh.runner.scheduler import Sequence


@dataclass(slots=True)
class Generation:
    """Lives from submit to its end. `index` counts output tokens, those of an earlier plan included."""

    request: GenerateRequest
    sequence: Sequence
    sampler: Sampler
    mailbox: Mailbox
    ballot: plan_pb2.Ballot
    index: int

    @staticmethod
    def begin(request: GenerateRequest, sequence_id: int, mailbox: Mailbox, ballot: plan_pb2.Ballot) -> Generation:
        """Prompt and already emitted tokens are context; the sampler counts the latter as output."""
        sampler = Sampler(request)
        sequence = Sequence(sequence_id, [*request.prompt_ids, *request.resume_ids])
        return Generation(request, sequence, sampler, mailbox, ballot, len(request.resume_ids))

    @property
    def max_positions(self) -> int:
        """KV positions that the sequence can come to hold."""
        return len(self.request.prompt_ids) + self.request.max_tokens

    def draw(self, logits: np.ndarray) -> tuple[int, FinishReason | None]:
        """Draw the next token from float32 `[vocab]` logits and post it; answer it and why the request ends, if so.

        Raises EngineError if the logits are not numbers to draw from.
        """
        draw = self.sampler.draw(logits, self.index)
        token_id = draw.token_id
        event = pb.TokenEvent(index=self.index)
        if token_id in self.request.stop_ids and not self.request.ignore_eos:
            finish: FinishReason | None = FinishReason.STOP
        else:
            event.token_id = token_id
            if draw.logprob is not None:
                event.logprob = draw.logprob
                event.top.extend(_top(draw.top))
            self.index += 1
            finish = FinishReason.LENGTH if self.index >= self.request.max_tokens else None
        event.finish = finish or ""
        self.mailbox.post(pb.GenerateEvents(ballot=self.ballot, events=[event]))
        return token_id, finish

    def post_prefilled(self, tokens: int) -> None:
        """Tell how many prompt tokens have been computed."""
        self.mailbox.post(pb.GenerateEvents(ballot=self.ballot, prefilled=tokens))

    def fail(self, error: MeshError) -> None:
        """End with one typed error."""
        self.mailbox.post(error_events(self.ballot, error))


def error_events(ballot: plan_pb2.Ballot, error: MeshError) -> pb.GenerateEvents:
    return pb.GenerateEvents(ballot=ballot, error_code=error.code, error_message=str(error))


def _top(top: tuple[TokenLogprob, ...]) -> list[pb.TokenLogprob]:
    return [pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob) for entry in top]
