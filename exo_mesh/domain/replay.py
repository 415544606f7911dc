"""Keeps answers for a while under the hash of a client's Idempotency-Key, to send them again and to continue them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.request import FinishReason, GenerateRequest, PromptLogprob, TokenEvent, TokenLogprob
from exo_mesh.domain.whole.text_pieces import Respelling, TextPiece, TextUsage
from exo_mesh.errors import KeyReusedError

RETENTION_S = 600.0
"""How long an answer is kept after its last token: longer than clients retry."""

MAX_KEPT = 1024
MAX_TOKENS = 2**21
"""Most tokens of all answers together: 8 MiB of ids. A token with log-probabilities counts LOGPROBS_COUNT times."""

LOGPROBS_COUNT = 50
PIECE_COUNT = 50
"""A piece of text takes about as much memory as 50 ids, and one more for each 4 characters."""

Output = int | TextPiece | Respelling
"""What one event of an answer adds to it: a token id or a piece of text. A Respelling adds nothing: it says which
tokens stand for the text so far."""


class Kept(msgspec.Struct):
    """The answer to a request so far: token ids, and then the rest from its first piece of text on.

    details: (logprob, likeliest others) of each token in `ids`, if they are wanted. At the front they are missing for
    tokens that another ring drew, because a ring receives only the ids of those.
    """

    fingerprint: bytes
    wants_details: bool
    at: float
    ids: array[int] = msgspec.field(default_factory=lambda: array("I"))
    details: list[tuple[float | None, tuple[TokenLogprob, ...]]] = msgspec.field(default_factory=list)
    finish: FinishReason | None = None
    live: bool = False
    prompt: list[PromptLogprob] = msgspec.field(default_factory=list)
    """Log-probabilities of the prompt from its second token on, as far as they are known, if they are wanted."""
    rest: list[Output] = msgspec.field(default_factory=list)
    """The output after `ids`; empty for an answer without pieces of text."""
    usage: TextUsage | None = None
    cached: int = 0
    """Prompt tokens that came from a prefix cache."""
    _rest_weight: int = 0

    def __len__(self) -> int:
        return len(self.ids) + len(self.rest)

    @property
    def weight(self) -> int:
        return 1 + len(self.ids) + LOGPROBS_COUNT * (len(self.details) + len(self.prompt)) + self._rest_weight

    def add(self, event: TokenEvent) -> None:
        """Appends the next event of the answer."""
        if event.piece is not None:
            self.rest.append(event.piece)
            self._rest_weight += PIECE_COUNT + len(event.piece.text) // 4
        elif event.respelling is not None:
            self.rest.append(event.respelling)
            self._rest_weight += PIECE_COUNT + len(event.respelling.ids)
        elif event.token_id is not None and self.rest:
            self.rest.append(event.token_id)
            self._rest_weight += PIECE_COUNT
        elif event.token_id is not None:
            self.ids.append(event.token_id)
            if self.wants_details:
                self.details.append((event.logprob, event.top))
        self.finish = event.finish or self.finish
        self.usage = event.usage or self.usage
        self.cached = event.cached or self.cached

    def meet(self, sent: Sequence[int]) -> None:
        """Brings the answer in line with the tokens that the client has already received.

        Tokens that another ring drew are adopted. Tokens whose log-probabilities are missing and that were not yet sent
        are dropped, to be computed again.
        """
        if len(sent) > len(self.ids):
            self.ids, self.details, self.finish = array("I", sent), [], None
        elif self.wants_details and len(self.ids) - len(self.details) > len(sent):
            del self.ids[len(sent) :]
            self.details.clear()
            self.finish = None

    def meet_pieces(self, sent: Sequence[TextPiece]) -> None:
        """Like `meet`, for an answer of an engine that gives text."""
        if len(sent) > len(self):
            del self.ids[:]
            self.rest, self.finish, self._rest_weight = [], None, 0
            for piece in sent:
                self.add(TokenEvent(len(self), None, piece=piece))

    def cut(self, length: int) -> None:
        """Drops the token ids from number `length` on, to be drawn again."""
        removed = max(0, len(self.ids) - length)
        if removed:
            del self.ids[length:]
            del self.details[max(0, len(self.details) - removed) :]
            self.finish = None

    def reopen(self) -> None:
        """Drops the output because log-probabilities of the prompt are missing: both are computed again, the prompt
        first."""
        del self.ids[:]
        self.details.clear()
        self.finish = None

    def events(self, start: int) -> list[TokenEvent]:
        """Returns the events from the token at `start` on, as they were sent."""
        unknown = len(self.ids) - len(self.details)
        found = []
        for index in range(start, len(self.ids)):
            logprob, top = self.details[index - unknown] if index >= unknown else (None, ())
            found.append(TokenEvent(index, self.ids[index], logprob, top))
        first = max(start, len(self.ids))
        found += [output_event(index, item) for index, item in enumerate(self.rest[first - len(self.ids) :], first)]
        if self.finish is FinishReason.STOP or (self.finish is not None and self.rest):
            found.append(TokenEvent(len(self), None, finish=self.finish, usage=self.usage))
        elif self.finish is not None and found:
            last = found[-1]
            found[-1] = TokenEvent(last.index, last.token_id, last.logprob, last.top, self.finish)
        elif self.finish is not None:
            found.append(TokenEvent(len(self.ids), None, finish=self.finish))
        if self.cached and found and not start:
            found[0] = replace(found[0], cached=self.cached)
        return found


def output_event(index: int, item: Output) -> TokenEvent:
    """The event that adds this output as number `index`."""
    if isinstance(item, TextPiece):
        return TokenEvent(index, None, piece=item)
    if isinstance(item, Respelling):
        return TokenEvent(index, None, respelling=item)
    return TokenEvent(index, item)


def output_of(event: TokenEvent) -> Output | None:
    """What an event adds to the output; None for an end that adds nothing."""
    added = event.piece or event.respelling
    return event.token_id if added is None else added


class ReplayStore:
    """Keeps answers, bounded by number, size and time. Live answers are never dropped; the requests bound those."""

    def __init__(self, max_kept: int = MAX_KEPT, max_tokens: int = MAX_TOKENS) -> None:
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._max_kept = max_kept
        self._max_tokens = max_tokens

    def __len__(self) -> int:
        return len(self._kept)

    def peek(self, key_hash: bytes) -> Kept | None:
        """Returns the answer for a key. It changes nothing, so any thread may call it."""
        return self._kept.get(key_hash)

    def open(self, request: GenerateRequest, now: float) -> Kept:
        """Returns the answer for a request, or an empty one, and marks it as live. Raises KeyReusedError if the key was
        used for a different request."""
        self._forget(now)
        kept = self._kept.get(request.key_hash)
        if kept is not None and kept.fingerprint != request.fingerprint:
            raise KeyReusedError("this Idempotency-Key was used for another request; send a new key with a new request")
        if kept is None:
            kept = Kept(request.fingerprint, request.sampling.logprobs is not None, now)
            self._kept[request.key_hash] = kept
        kept.live, kept.at = True, now
        self._kept.move_to_end(request.key_hash)
        return kept

    def close(self, kept: Kept, now: float) -> None:
        """Marks an answer as complete; nothing is added to it any more."""
        kept.live, kept.at = False, now
        self._forget(now)

    def _forget(self, now: float) -> None:
        weight = sum(kept.weight for kept in self._kept.values())
        for key_hash, kept in list(self._kept.items()):
            too_many = len(self._kept) > self._max_kept or weight > self._max_tokens
            if not kept.live and (too_many or now - kept.at > RETENTION_S):
                weight -= kept.weight
                del self._kept[key_hash]
