"""Follows an answer to its end, even if the node that streams it dies: another member then continues it.

Each attempt has the same Idempotency-Key and requests the whole answer. The mesh sends the part that was computed
already at once, and text that is on the screen is not shown again. docs/how-it-works/continuation.md has the contract.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from exo_mesh.cli.client.api_client import STREAM_SILENCE_S, ApiClient, NoNodeError
from exo_mesh.cli.client.mesh_nodes import MeshNodes
from exo_mesh.cli.verbs.chat.answer import PATH, AnswerSoFar, ChatAnswer, body_of
from exo_mesh.errors import (
    DeadlineError,
    MeshError,
    NodeStoppingError,
    NotReadyError,
    OverloadError,
    StageLostError,
    TransportError,
    UnknownModelError,
)

SILENCE_S = 15.0
"""Timeout of a stream from a loaded model: a live node sends a comment every 2 s while an answer waits."""
PATIENCE_S = 90.0
"""Retries end this long after a failure if no new text arrives."""
PAUSE_S = 0.7
"""Pause between two rounds over all members."""

_MOVES = (TransportError, DeadlineError, NodeStoppingError, NotReadyError)
"""Errors after which another member may succeed."""
_WAITS = (OverloadError, UnknownModelError, StageLostError)
"""Errors to retry once an answer has begun: they end when the other members have noticed the failure."""


class AnswerSink(Protocol):
    """Shows an answer as it arrives."""

    def text(self, piece: str) -> None: ...

    def reasoning(self, piece: str) -> None: ...

    def waiting(self, what: str) -> None: ...

    def restarted(self) -> None:
        """The answer was computed again and differs: discard what was shown. May raise MeshError."""


def follow(
    members: MeshNodes,
    model: str,
    messages: Sequence[Mapping[str, str]],
    parameters: Mapping[str, Any],
    sink: AnswerSink,
    *,
    is_loaded: bool = False,
) -> ChatAnswer:
    """Asks, shows each piece once, and returns the whole answer. Raises MeshError if no member can finish it.

    is_loaded: the model is loaded, so the short timeout applies from the first attempt.
    """
    following = _Following(body_of(model, messages, parameters), sink, is_loaded)
    while True:
        client = members.client
        try:
            return following.attempt(client)
        except MeshError as exc:
            if exc.code == "invalid_api_key":
                members.return_to_first()
            if not following.may_go_on(exc, len(members)):
                raise
            sink.waiting(f"{members.name_of(client)} does not answer, trying another member")
            members.leave(client)
            following.pause(len(members))


class _Following:
    """Makes the attempts for one question, and shows each piece of the answer once."""

    def __init__(self, body: dict[str, Any], sink: AnswerSink, is_loaded: bool) -> None:
        self._body = body
        self._sink = sink
        self._headers = {"Idempotency-Key": str(uuid.uuid4())}
        self._silence_s = SILENCE_S if is_loaded else STREAM_SILENCE_S
        self._shown = AnswerSoFar()
        self._began = time.monotonic()
        self._failing_since: float | None = None
        self._first: float | None = None
        self._num_attempts = 0

    def attempt(self, client: ApiClient) -> ChatAnswer:
        """Makes one attempt at one node."""
        self._num_attempts += 1
        made = AnswerSoFar()
        for event in client.stream(
            PATH, self._body, self._sink.waiting, headers=self._headers, silence_s=self._silence_s
        ):
            self._silence_s = SILENCE_S
            made.add(event)
            self._show(made)
        return made.answer(self._began, self._first, time.monotonic())

    def may_go_on(self, error: MeshError, num_members: int) -> bool:
        """Whether another attempt may succeed."""
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since > PATIENCE_S:
            return False
        if isinstance(error, NoNodeError) and num_members == 1:
            return False  # there is no other member to try
        has_begun = self._num_attempts > 1 or bool(self._shown.text or self._shown.reasoning)
        if isinstance(error, _MOVES):
            return has_begun or num_members > 1
        return has_begun and isinstance(error, _WAITS)

    def pause(self, num_members: int) -> None:
        """Waits after each round over the members, so that a mesh that cannot answer is not flooded with retries."""
        if self._num_attempts % num_members == 0:
            time.sleep(PAUSE_S)

    def _show(self, made: AnswerSoFar) -> None:
        """Shows the part of `made` that was not shown yet."""
        if not (made.text or made.reasoning):
            return
        self._first = self._first or time.monotonic()
        shown = self._shown
        if not (_agree(made.text, shown.text) and _agree(made.reasoning, shown.reasoning)):
            self._sink.restarted()
            shown.text = shown.reasoning = ""
        if piece := made.reasoning[len(shown.reasoning) :]:
            self._failing_since = None
            shown.reasoning += piece
            self._sink.reasoning(piece)
        if piece := made.text[len(shown.text) :]:
            self._failing_since = None
            shown.text += piece
            self._sink.text(piece)


def _agree(one: str, other: str) -> bool:
    """Whether one of the texts is a prefix of the other."""
    return one.startswith(other) or other.startswith(one)
