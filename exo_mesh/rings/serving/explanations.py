"""Remembers of the last requests where their prompts parted from what their rings kept, for people who ask why a prompt
was computed again."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from exo_mesh.domain.request import GenerateRequest, PrefixReport
from exo_mesh.rings.serving.history import RequestOutcome

MAX_KEPT = 512
"""Requests that are remembered: a kilobyte each."""

AROUND = 16
"""Tokens of a prompt before and behind the place where it parts from a kept one."""


class Explanation(msgspec.Struct, frozen=True):
    """The facts about the prompt of one request. common: tokens that it has in common with the nearest kept sequence;
    before, mine: its tokens before and behind these; theirs: those of the kept sequence, if that is of the same client.
    first_s: time to its first token. output_tokens: of its answer; accepted_drafts, rejected_drafts: see
    RequestOutcome."""

    request_id: str
    model: str
    key_id: str
    prompt_tokens: int
    cached_tokens: int
    common: int
    before: tuple[int, ...]
    mine: tuple[int, ...]
    theirs: tuple[int, ...]
    is_own: bool
    first_s: float | None
    output_tokens: int
    accepted_drafts: int
    rejected_drafts: int


def explain(request: GenerateRequest, model: str, report: PrefixReport, ended: RequestOutcome) -> Explanation:
    """Makes the explanation of a request."""
    prompt, at = request.prompt_ids, min(report.common, len(request.prompt_ids))
    return Explanation(
        request.request_id,
        model,
        request.key_id,
        len(prompt),
        ended.cached_tokens,
        at,
        prompt[max(0, at - AROUND) : at],
        prompt[at : at + AROUND],
        report.theirs,
        report.is_own,
        ended.ttft_s,
        ended.output_tokens,
        ended.accepted_drafts,
        ended.rejected_drafts,
    )


class Explanations:
    """The explanations of the last MAX_KEPT requests, by each id that a client saw."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, Explanation] = OrderedDict()

    def add(self, explanation: Explanation, names: tuple[str, ...]) -> None:
        """Remember a request. names: its other ids."""
        for name in {explanation.request_id, *names}:
            self._found[name] = explanation
            self._found.move_to_end(name)
        while len(self._found) > 2 * MAX_KEPT:
            self._found.popitem(last=False)

    def find(self, request_id: str, key_id: str | None = None) -> Explanation | None:
        """Returns the explanation of a request. With a key_id only of a request with this API key ("": without one)."""
        found = self._found.get(request_id)
        return found if found is not None and key_id in (None, found.key_id) else None
