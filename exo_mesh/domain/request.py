"""What a request asks for and what it yields, as token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from exo_mesh.domain.grammar import GrammarSpec


class FinishReason(StrEnum):
    """Why a request ended well. Everything else ends in one typed error."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. All of it is honoured by the one NumPy sampler of the driver.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0 mean "off".
    repetition_penalty divides (positive logits) or multiplies (negative) what prompt and output contain, as in
    Keskar et al. 2019; presence and frequency penalties count output tokens only, as OpenAI documents them.
    logprobs: None = not wanted, else how many of the likeliest alternatives come with each token (0 to 20).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How many tokens a thought may take. When they are used up, `end_ids` come next, whatever the model would say.

    start_ids: what a thought begins with in the output; empty if the prompt has begun it. Neither marker counts.
    """

    end_ids: tuple[int, ...]
    tokens: int
    start_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.end_ids or self.tokens < 0:
            raise ValueError(f"a thinking budget of {self.tokens} tokens, ended by {list(self.end_ids)}")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Token ids in. `resume_ids` were already emitted by an earlier plan: they count as output, and are not sent again.

    stop_ids end the request when drawn and are not emitted, unless ignore_eos; they cannot be drawn before
    min_tokens have been. max_tokens 0: nothing is drawn, and the request ends once its prompt_logprobs have come.
    client: whose turn this request is, in the fair sharing of a ring; a higher priority goes
    before all lower ones.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    resume_ids: tuple[int, ...] = ()
    client: str = ""
    priority: int = 0
    trace_id: str = ""
    """Not empty: every lap of this request is written down, for people."""
    span_id: str = ""
    """Of its own span in the trace, 16 hex digits; empty: derived from its ids. Only the entry peer knows this and the
    next two."""
    parent_span_id: str = ""
    """The caller's span; empty if the trace begins here."""
    trace_state: str = ""
    """The caller's tracestate, which exported spans carry."""
    resumed: bool = False
    """It was accepted on an earlier ring: it does not queue again."""
    key_hash: bytes = b""
    """Of the client's Idempotency-Key, under which the answer is kept for a while; empty if it gave none."""
    fingerprint: bytes = b""
    """Of what the client asked for: one key stands for one request."""
    key_id: str = ""
    """The API key that the request came with; empty without one. Only the entry peer knows it."""
    names: tuple[str, ...] = ()
    """Other ids of it that the client saw, by which it can be cancelled and its trace found: the id of the reply, the
    x-request-id. Only the entry peer knows them."""
    share_id: str = ""
    """Not empty: running requests with the same one compute an equal prompt once (serving/choices.py)."""
    prompt_logprobs: int | None = None
    """None: not wanted. Else the log-probability of every prompt token but the first comes before the first output
    token, each with so many of the likeliest alternatives (0 to 20)."""
    grammar: GrammarSpec | None = None
    """What the output is held to, from its first token on. It ends where the grammar is complete; stop_ids can be drawn
    only where it may end, or where it names them."""
    thinking: ThinkingBudget | None = None
    keep_alive_s: float | None = None
    """How long the model shall stay loaded after this request though nobody uses it; negative: for ever; None: as the
    mesh is set. Only the entry peer knows it."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("the prompt has no tokens")
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens is {self.max_tokens}")

    @property
    def num_scores(self) -> int:
        """How many log-probabilities of prompt tokens are wanted: the first token has none."""
        return 0 if self.prompt_logprobs is None else len(self.prompt_ids) - 1


@dataclass(frozen=True, slots=True)
class StageSpan:
    """Seconds of one frame at one stage: waiting for its turn, then computing."""

    waited_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class FrameTrace:
    """One lap of a frame that a traced request had a row in. sent_s: since the driver got the request. rows, tokens: of
    the whole frame; it may have carried others, too."""

    step: int
    is_prefill: bool
    rows: int
    tokens: int
    sent_s: float
    lap_s: float
    stages: tuple[StageSpan, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token under the model's distribution before temperature and truncation."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Natural-log probability of the prompt token at `index` (1 or more), given all tokens before it, and the likeliest
    tokens at its place."""

    index: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Neighbouring prompt tokens, in order: a piece of what a request with `prompt_logprobs` yields first."""

    entries: tuple[PromptLogprob, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The `index`-th output token of a request, or its end.

    token_id is None on an end that emits nothing (a stop id was drawn). finish is set on the last event only.
    """

    index: int
    token_id: int | None
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Queued:
    """From a driver: the request waits for its turn. place: 1 is next; 0: it has its turn. length: of the whole queue.
    wait_s: until its turn, as the driver estimates; 0.0 if it cannot."""

    place: int
    length: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prefilled:
    """From a driver, before the first token: how many prompt tokens have been computed."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """From a driver: the token events that came in one message, in order."""

    events: tuple[TokenEvent, ...]


DriverEvent = Queued | Prefilled | PromptLogprobs | Tokens


@dataclass(frozen=True, slots=True)
class Progress:
    """A sign of life before the first token. phase: what is being waited for, "placing", "fetching", "loading",
    "queued", "prefill" or "recovering". done: of `total`, for "fetching" in bytes; for "queued" the place in a queue of
    `total` requests. wait_s: until its turn in the queue, as estimated; 0.0 if that is not known."""

    phase: str
    done: int = 0
    total: int = 0
    wait_s: float = 0.0


RequestEvent = TokenEvent | PromptLogprobs | Progress
"""What a request yields at its entry peer."""
