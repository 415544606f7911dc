"""A request on the ring: its tokens, the positions that stages hold, and the wanted results. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from exo_mesh.domain.frame import LONGEST_DRAFT, Row
from exo_mesh.domain.images import PictureSpec, content_of_prompt


class Work(NamedTuple):
    """Rows of one frame and their token ids: decode rows of one batch, or one chunk of prefill, which may hold the end
    of one prompt and the whole of others. upto: only stages before this one compute it; 0 means all. is_scoring: of a
    chunk, whether logits of whole parts of prompts are wanted. drawing: the sequences whose next tokens are drawn from
    it, in the order of their rows. goes_ahead: it has one row, of drafts alone, behind another row of its sequence."""

    rows: tuple[Row, ...]
    token_ids: tuple[int, ...]
    upto: int = 0
    is_scoring: bool = False
    is_prefill: bool = False
    drawing: tuple[Sequence, ...] = ()
    goes_ahead: bool = False


class Sequence(msgspec.Struct):
    """A request on the ring. tokens: prompt, then output. computed: positions already sent round for computing, with
    those of drafts that are not judged yet.

    All but the last prompt token are prefilled. The last one ends the last chunk, see `ends_in_chunk`, or is the first
    decode row.
    """

    id: int
    tokens: list[int]
    client: str = ""
    priority: int = 0
    resumed: bool = False
    computed: int = 0
    on_way: int = 0
    """Rows on their way round the ring whose logits decide about the next tokens."""
    stale: int = 0
    """Rows on their way that a refused draft has made useless: they come round before those of `on_way`."""
    ahead: list[int] = msgspec.field(default_factory=list)
    """Drafts on their way: the tokens that were sent for the positions after the last known token."""
    refusals: int = 0
    """How many times a draft was refused, and all drafts behind it."""
    starts: list[int] = msgspec.field(default_factory=list)
    """Positions at which the last rows with drafts began, if KV can be cut back only to these."""
    is_judging: bool = False
    """Whether logits have come round that wait until the tokens that may come are known."""
    parked: bool = False
    """Whether the reader of its output is too slow: it gets no further rows, and keeps its KV until others want its
    place."""
    last_turn: int = 0
    """Number of the last decode frame with a row of this sequence."""
    held: int = 0
    """Positions that the later stages of the ring hold from a lower ballot: only the other stages prefill them."""
    forced: int = 0
    """The number of last tokens that were forced, not drawn: they go round in one row with the token before them."""
    share_id: str = ""
    """See GenerateRequest."""
    num_shared: int = 0
    """Positions of the prompt that other sequences can copy: all but the last."""
    prompt: int = 0
    """Positions that the same prompt can copy later: all of the prompt but the last."""
    source: Sequence | None = None
    """The sequence whose prompt this one will copy: it has its place, and waits until that prompt is computed."""
    draws: bool = True
    """Whether tokens are to be drawn, besides the log-probabilities of the prompt."""
    scores: int = 0
    """The number of positions of the prompt whose logits are wanted."""
    scored: int = 0
    """The number of these positions that have come round."""
    snapshot_at: int = 0
    """A chunk of the prompt ends at this position, so that stages can copy the KV as it is there; 0: at none."""
    is_kept: bool = True
    """Whether stages may keep its KV after its end, for other prompts."""
    embeds: bool = False
    """Whether hidden states are wanted of these positions, and not logits. The last token is then prefilled too."""
    is_whole: bool = False
    """Whether all tokens must be in one row, because each of them sees all others."""
    second: int = 0
    """See Row; of a sequence in one row."""
    judges: bool = False
    """Whether logits are wanted in place of hidden states."""
    cache_scope: bytes = b""
    """Only sequences of the same scope share KV."""
    pictures: tuple[PictureSpec, ...] = ()
    """The images of its prompt."""
    expected: int = 0
    """Positions that it will probably hold together with running sequences, until it has begun at the stages."""
    awaits_images: bool = False
    """Whether some image has not been sent to the stages yet: it gets no rows before."""
    awaits_disk: bool = False
    """Whether stages are reading the beginning of its prompt from their disks: it gets no rows before."""

    @property
    def waits(self) -> bool:
        return self.source is not None

    @property
    def decoding(self) -> bool:
        """Whether its next token depends on a row that is on its way, or waits to be drawn."""
        return self.on_way > 0 or self.is_judging

    @property
    def settled(self) -> int:
        """Positions sent round for computing whose tokens are known to be right."""
        return min(self.computed, len(self.tokens))

    @property
    def may_go_ahead(self) -> bool:
        """Whether drafts may follow behind the rows that are on their way: all that is known has been sent."""
        is_all_sent = self.computed == len(self.tokens) + len(self.ahead)
        return self.on_way > 0 and is_all_sent and not (self.is_judging or self.parked)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add output. Drafts that say otherwise are refused, with all rows behind them."""
        last, refusals = len(self.tokens) - 1, self.refusals
        is_held = self.computed > last  # not of a sequence that was evicted
        for token_id in token_ids:
            if self.ahead and self.ahead[0] == token_id:
                del self.ahead[0]
            elif self.ahead:
                self._refuse()
            self.tokens.append(token_id)
        sent = self.computed if self.refusals > refusals and is_held else max(last, self.computed)
        self.forced = max(0, min(len(self.tokens) - 1 - sent, LONGEST_DRAFT - 1))

    def _refuse(self) -> None:
        """Forget the drafts that are on their way: the next row begins where they differ from what was drawn, or where
        the row with that position began."""
        here = len(self.tokens)
        begins = max((start for start in self.starts if start <= here), default=here)
        self.computed = min(self.computed, begins)
        self.stale += self.on_way
        self.on_way = 0
        self.refusals += 1
        self.ahead.clear()
        self.starts.clear()

    def lose_rows(self) -> None:
        """Note that the rows on their way will not come round."""
        self.computed = self.settled
        self.on_way = self.stale = 0
        self.ahead.clear()
        self.starts.clear()
        self.is_judging = False

    def came_round(self) -> bool:
        """Note that a row is back, or will never be; False if it is stale."""
        if self.stale:
            self.stale -= 1
            return False
        self.on_way = max(0, self.on_way - 1)
        return True

    def content(self, stop: int) -> list[int]:
        """The content that decides the KV of the first positions: token ids, and in place of an image's ids its
        digest."""
        return content_of_prompt(self.tokens[:stop], self.pictures)

    @property
    def prefill_left(self) -> int:
        if self.source is not None or self.awaits_images or self.awaits_disk:
            return 0
        left = len(self.tokens) - 1 + self.embeds - self.forced - self.computed
        return left if left > 0 else 0  # `max` would take a third of the time, and each frame asks all sequences

    @property
    def chunk_left(self) -> int:
        """The most positions of the next chunk."""
        left = self.prefill_left
        return min(left, self.snapshot_at - self.computed) if self.computed < self.snapshot_at else left

    @property
    def may_begin_as_copy(self) -> bool:
        """Whether its first positions need not be computed if stages hold them: not if stages hold KV of it already, or
        if logits or hidden states of its prompt are wanted."""
        return not (self.computed or self.held or self.wants_scores or self.embeds)

    @property
    def wants_scores(self) -> bool:
        return self.scored < self.scores

    @property
    def ends_in_chunk(self) -> bool:
        """Whether the last token of the prompt may be computed with the tokens before it, which saves a lap. Who
        copies the prompt must then cut the KV back. Choices of one request copy all but the last token, and draw from a
        row of their own each. A sequence that was evicted while its last row was on its way waits for that row."""
        return self.draws and not (self.decoding or self.share_id or self.forced or self.wants_scores or self.parked)

    @property
    def catch_up_left(self) -> int:
        if self.waits or self.awaits_images or self.awaits_disk:
            return 0
        return max(0, min(self.held, len(self.tokens) - 1 + self.embeds) - self.computed)

    def ends_with(self, row: Row) -> bool:
        """Whether a row has the last token: from its logits the next ones are drawn."""
        return row.pos0 + row.n >= len(self.tokens)

    def last_row(self) -> Row:
        """The row of all positions that are left, with the logits of the last one."""
        return Row(self.id, self.computed, len(self.tokens) - self.computed, num_logits=1)

    def prefill_row(self, n: int) -> Row:
        """The row of the next n positions, with the number of logits or hidden states that are wanted of them."""
        stop = self.computed + n
        wanted = stop - max(self.computed, self.scored) if self.wants_scores and self.computed < self.scores else 0
        if self.embeds and not self.judges:
            return Row(self.id, self.computed, n, num_hidden=max(0, wanted), second=self.second)
        return Row(self.id, self.computed, n, max(0, wanted))


class SequenceIds(msgspec.Struct):
    """Numbers the sequences of a driver, also sequences that only its prefix cache has. last: the newest id."""

    last: int = 0

    def next(self) -> int:
        """Take an id."""
        self.last += 1
        return self.last


def those_that_fit(held: Mapping[int, int], running: Iterable[Sequence], most: int) -> dict[int, int]:
    """The oldest sequences of `held` that fit into `most` positions at their full length. While they shared positions,
    more of them may have run: the others must not keep memory while they wait."""
    fitting: dict[int, int] = {}
    for sequence in running:
        most -= len(sequence.tokens)
        if sequence.id in held and (most >= 0 or not fitting):
            fitting[sequence.id] = held[sequence.id]
    return fitting
