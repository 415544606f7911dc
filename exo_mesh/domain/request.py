"""A request and its results: as token ids, or as text for a model that an engine with its own tokenizer serves.

Also the form that a client requires of the text of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal, Protocol

import msgspec

from exo_mesh.domain.embedding import MAX_WIDTH, EmbedSpec
from exo_mesh.domain.fields import Clamped, Cut, Flat, Newer, NotSent, Range, Size, Tidied
from exo_mesh.domain.images import Picture, pictures_defect
from exo_mesh.domain.model_settings import MAX_TOKEN_ID
from exo_mesh.domain.whole.text_pieces import Respelling, TextInput, TextPiece, TextUsage

GrammarKind = Literal["json_schema", "lark", "regex", "choice"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """A grammar. text: a JSON schema, a Lark grammar whose first rule is `start`, a regular expression for the whole
    answer, or a JSON list of strings of which the answer is one."""

    kind: GrammarKind
    text: str


class FinishReason(StrEnum):
    """Why a request ended normally. Every other end is one typed error."""

    STOP = "stop"
    LENGTH = "length"


FLEX_PRIORITY = -11
"""Of requests with the service tier "flex": below every priority that a client can name."""

MAX_PRIORITY = 10
MAX_LOGPROBS = 20
MIN_REPETITION_PENALTY = 1e-3
MAX_MARKER_IDS = 256
"""Most token ids that begin and end a thought."""

MAX_SHOWN = 16
"""Most tokens of a kept sequence that a driver may show."""

TokenIds = Annotated[tuple[int, ...], Range(0, MAX_TOKEN_ID)]
_Share = Annotated[float, Range(0.0, 1.0)]
_AnyFinite = Annotated[float, Range(-math.inf, math.inf)]
_Hash = Annotated[bytes, Size(sizes=(0, 32))]
_Word = Annotated[str, Cut(64)]


class SamplingParams(msgspec.Struct, frozen=True):
    """How the next token is drawn. The driver's NumPy sampler honours every field.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0 mean "off".
    repetition_penalty divides positive logits and multiplies negative logits of tokens in prompt and output, as in
    Keskar et al. 2019; it looks at the last repetition_window tokens, at all if that is 0. presence and frequency
    penalties count output tokens only, as OpenAI documents them. logprobs: None = not wanted, else how many of the
    likeliest alternatives come with each token (0 to 20).
    """

    temperature: Annotated[float, Range(0.0, math.inf)] = 1.0
    top_k: int = 0
    top_p: _Share = 1.0
    min_p: _Share = 0.0
    repetition_penalty: Annotated[float, Range(MIN_REPETITION_PENALTY, math.inf)] = 1.0
    presence_penalty: _AnyFinite = 0.0
    frequency_penalty: _AnyFinite = 0.0
    logit_bias: tuple[tuple[int, _AnyFinite], ...] = ()
    seed: int = 0
    logprobs: Annotated[int, Range(0, MAX_LOGPROBS)] | None = None
    repetition_window: int = 0


class ThinkingBudget(msgspec.Struct, frozen=True):
    """How many tokens a thought may take. After that many tokens `end_ids` are forced.

    start_ids: the tokens that begin a thought in the output; empty if the prompt has begun it. Neither marker counts.
    """

    end_ids: TokenIds
    tokens: int
    start_ids: TokenIds = ()

    def __post_init__(self) -> None:
        if len(self.end_ids) + len(self.start_ids) > MAX_MARKER_IDS:
            raise ValueError(f"end_ids and start_ids have more than {MAX_MARKER_IDS} token ids")
        if not self.end_ids or self.tokens < 0:
            raise ValueError(f"a thinking budget needs tokens >= 0 and end_ids: {self.tokens}, {list(self.end_ids)}")


class TextBridge(Protocol):
    """Converts the beginning of an answer between token ids and text; the entry peer has the model's tokenizer."""

    def respelling(self, pieces: Sequence[TextPiece]) -> Respelling:
        """The tokens with which a model would have written these pieces. Raises EngineError if it cannot have."""

    def pieces_of(self, token_ids: Sequence[int]) -> tuple[TextPiece, ...]:
        """The pieces of text that these token ids mean."""


class Tally(Protocol):
    """Sums up the ends of the requests of one call; see rings/serving/call_tally.py."""

    def add(self, ended: Any, entered_at: float, record: Callable[[Any], None]) -> None:
        """Add the end of a request. record: takes the sum once the call ends."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request as token ids, as text, or as both: the instance that takes it decides which of the two is used.
    `resume_ids` were emitted under an earlier plan: they count as output and are not resent.

    stop_ids end the request when drawn and are not emitted, unless ignore_eos; they cannot be drawn before min_tokens
    other tokens. max_tokens 0: nothing is drawn, and the request ends after its prompt_logprobs. client: whose share of
    a ring this request uses; a higher priority goes before all lower ones, FLEX_PRIORITY is the lowest.
    """

    request_id: str
    prompt_ids: TokenIds
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    resume_ids: TokenIds = ()
    client: _Word = ""
    priority: Annotated[int, Clamped(FLEX_PRIORITY, MAX_PRIORITY)] = 0
    trace_id: _Word = ""
    """Not empty: the driver records every lap of this request, for people."""
    span_id: Annotated[str, NotSent()] = ""
    """Its own span in the trace, 16 hex digits; empty: derived from its ids. Only the entry peer knows this field and
    the two after it."""
    parent_span_id: Annotated[str, NotSent()] = ""
    """The caller's span; empty if the trace begins here."""
    trace_state: Annotated[str, NotSent()] = ""
    """The caller's tracestate, which exported spans carry."""
    resumed: bool = False
    """The request was accepted on an earlier ring, so it does not queue again."""
    key_hash: _Hash = b""
    """Hash of the client's Idempotency-Key, under which the answer is kept for a while; empty without a key."""
    fingerprint: _Hash = b""
    """Digest of what the client asked for: one key is valid for one request."""
    key_id: Annotated[str, NotSent()] = ""
    """The API key that the request was sent with; empty without one. Only the entry peer knows it."""
    names: Annotated[tuple[str, ...], NotSent()] = ()
    """Other ids of the request that the client saw (the id of the reply, the x-request-id), by which it can be
    cancelled and its trace found. Only the entry peer knows them."""
    share_id: Annotated[str, Cut(256)] = ""
    """Not empty: running requests with the same share_id compute an equal prompt once (rings/serving/choices.py)."""
    prompt_logprobs: Annotated[int, Range(0, MAX_LOGPROBS)] | None = None
    """None: not wanted. Else the log-probability of every prompt token but the first comes before the first output
    token, each with this many of the likeliest alternatives (0 to 20)."""
    grammar: GrammarSpec | None = None
    """Restricts the output from its first token on. The output ends where the grammar is complete; stop_ids can be
    drawn only where it may end, or where the grammar names them."""
    thinking: ThinkingBudget | None = None
    begins_with: Annotated[str, Size(64 << 10)] = ""
    """The tokens after resume_ids spell this text, and may spell more with the last of them."""
    text: TextInput | None = None
    """What the client asked for, as text. A request for a model without a tokenizer in the mesh has no prompt_ids."""
    bridge: Annotated[TextBridge | None, NotSent()] = field(default=None, compare=False, repr=False)
    """Set for a request as ids and as text. Only the entry peer knows it."""
    tally: Annotated[Tally | None, NotSent()] = field(default=None, compare=False, repr=False)
    """Set for a request that is a part of a call: the call is recorded, and not each request. Only the entry peer knows
    it."""
    embed: EmbedSpec | None = None
    """Set: the result is one vector of the prompt, and nothing is drawn."""
    is_kept: Annotated[bool, NotSent()] = True
    """Whether stages may keep its KV after its end, for later prompts."""
    cache_scope: Annotated[bytes, Cut(64)] = b""
    """If not empty, the request shares kept KV only with requests of the same scope, in both directions."""
    pictures: Annotated[tuple[Picture, ...], NotSent()] = ()
    """The images of the prompt, in order. Their tokens in prompt_ids are placeholders."""
    drafts: Annotated[bool, NotSent()] = True
    """Whether the next tokens may be drafted. They never change what is drawn."""
    expected_ids: TokenIds = ()
    """An answer that the client expects, as far as it knows it: a source of drafts."""
    keep_alive_s: Annotated[float | None, NotSent()] = None
    """How long the model stays loaded after this request while nobody uses it; negative: for ever; None: the mesh's
    setting. Only the entry peer knows it."""

    def __post_init__(self) -> None:
        if not self.prompt_ids and self.text is None:
            raise ValueError("the prompt has no tokens")
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens is {self.max_tokens}, less than 0")
        if self.embed is not None and (self.max_tokens or self.resume_ids or self.prompt_logprobs is not None):
            raise ValueError("a request for a vector takes no output tokens and no log-probabilities")
        if self.embed is not None and self.prompt_ids and self.embed.second >= len(self.prompt_ids):
            raise ValueError(f"the second text begins at {self.embed.second} of {len(self.prompt_ids)} tokens")
        if defect := pictures_defect([picture.spec for picture in self.pictures], len(self.prompt_ids)):
            raise ValueError(defect)

    @property
    def num_scores(self) -> int:
        """How many log-probabilities of prompt tokens are wanted: the first token has none."""
        return 0 if self.prompt_logprobs is None else len(self.prompt_ids) - 1


class StageSpan(msgspec.Struct, frozen=True):
    """Seconds of one frame at one stage: waiting in the queue, then computing."""

    waited_s: float
    compute_s: float


class FrameTrace(msgspec.Struct, frozen=True):
    """One lap of a frame with a row of a traced request. sent_s: since the driver received the request. rows, tokens:
    of the whole frame, which may have carried other requests too."""

    step: int
    is_prefill: bool
    rows: int
    tokens: int
    sent_s: float
    lap_s: float
    stages: tuple[StageSpan, ...]


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of a token under the model's distribution before temperature and truncation."""

    token_id: int
    logprob: float


class PromptLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of the prompt token at `index` (1 or more), given all tokens before it, and the likeliest
    tokens at its place."""

    index: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Consecutive prompt tokens with their log-probabilities: a request with `prompt_logprobs` yields them first."""

    entries: tuple[PromptLogprob, ...]


def _whole_floats(values: bytes) -> bytes:
    if len(values) % 4:
        raise ValueError(f"a vector of {len(values)} bytes is not one of float32 values")
    return values


class TokenEvent(msgspec.Struct, frozen=True):
    """The output token number `index` of a request, or its end.

    token_id is None on an end that emits nothing (a stop id was drawn). finish is set on the last event only. From an
    engine that gives text, an event has a `piece` instead of a token id, and `usage` on the last event; respelling:
    which tokens stand for the text so far, before the first token of a ring that continues it. cached: on the first
    event, the prompt tokens that came from a prefix cache. accepted, rejected: on the last event, how many drafts
    became output, and how many did not. vector: the result of a request for a vector, on its only event: float32
    values, little-endian.
    """

    index: int
    token_id: int | None
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    finish: Annotated[FinishReason | None, Newer()] = None
    piece: TextPiece | None = None
    usage: Annotated[TextUsage | None, Flat()] = None
    cached: int = 0
    vector: Annotated[bytes | None, Size(4 * MAX_WIDTH, least=4), Tidied(_whole_floats)] = None
    respelling: Respelling | None = None
    accepted: int = 0
    rejected: int = 0


class Queued(msgspec.Struct, frozen=True):
    """From a driver: the request waits in the queue. place: 1 is next; 0: it leaves the queue. length: of the whole
    queue. wait_s: the estimated wait; 0.0 if it cannot be estimated."""

    place: int
    length: int = 0
    wait_s: float = 0.0


class Prefilled(msgspec.Struct, frozen=True):
    """From a driver, before the first token: how many prompt tokens have been computed."""

    num_tokens: int


class PrefixReport(msgspec.Struct, frozen=True):
    """From a driver, as a request begins: where its prompt parts from the kept sequence that begins most like it.
    common: tokens that both begin with; theirs: what follows there, if it is of the same client (is_own)."""

    common: int
    theirs: Annotated[tuple[int, ...], Cut(MAX_SHOWN)] = ()
    is_own: bool = False


class Tokens(msgspec.Struct, frozen=True):
    """From a driver: the token events of one message, in order."""

    events: tuple[TokenEvent, ...]


DriverEvent = Queued | Prefilled | PromptLogprobs | Tokens


class Progress(msgspec.Struct, frozen=True):
    """Progress before the first token. phase: what the request waits for, "placing", "fetching", "loading", "queued",
    "prefill" or "recovering". done: of `total`, for "fetching" in bytes; for "queued" the place in a queue of `total`
    requests. wait_s: the estimated wait in the queue; 0.0 if unknown."""

    phase: str
    done: int = 0
    total: int = 0
    wait_s: float = 0.0


RequestEvent = TokenEvent | PromptLogprobs | Progress
"""What a request yields at its entry peer."""
