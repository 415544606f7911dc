"""The replies of /bench: OpenAI's replies, with the time that each part of the request took."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import asdict

from exo_mesh.api.core.preparing import PreparedRequest
from exo_mesh.api.openai.objects import ChatCompletion, TextCompletion
from exo_mesh.api.openai.schema import GenerationBody
from exo_mesh.base.clock import monotonic
from exo_mesh.errors import InputError
from exo_mesh.node.inspection.breakdown import HandlerTimes, RequestParts, parts_of
from exo_mesh.node.inspection.trace_formats import trace_stats
from exo_mesh.rings.serving.traces import RequestTrace


class BenchTimes(msgspec.Struct):
    """Where the time of a request went. ttft_s: from its arrival to its first token. prefill_tokens_per_s: tokens of
    the prompt over the time from the first frame to the first token. decode_tokens_per_s: of the tokens after it.
    hop_s: mean time of a lap per stage without computing and waiting. stages: as in /v1/traces/{id}/stats."""

    total_s: float
    parts: RequestParts
    ttft_s: float | None
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefill_laps: int
    decode_laps: int
    hop_s: float
    trace_id: str
    stages: list[dict[str, Any]]


class TimedChatCompletion(ChatCompletion, kw_only=True):
    """The reply of /bench/chat/completions. bench: null if the trace of the request was dropped for newer ones."""

    bench: BenchTimes | None


class TimedTextCompletion(TextCompletion, kw_only=True):
    """The reply of /bench/completions. bench: as in TimedChatCompletion."""

    bench: BenchTimes | None


TIMED: dict[type[ChatCompletion | TextCompletion], type[TimedChatCompletion | TimedTextCompletion]] = {
    ChatCompletion: TimedChatCompletion,
    TextCompletion: TimedTextCompletion,
}


class HandlerClock:
    """Notes when the handler of a /bench request did what."""

    def __init__(self) -> None:
        self._began = self._asked = self._prepared = monotonic()
        self._template_s = self._tokenizer_s = 0.0

    def asked(self) -> None:
        """The body is read and checked."""
        self._asked = monotonic()

    def prepared(self, request: PreparedRequest) -> None:
        """The prompt is ready in tokens."""
        self._prepared = monotonic()
        self._template_s, self._tokenizer_s = request.template_s, request.tokenizer_s

    def ended(self) -> HandlerTimes:
        """The reply is built."""
        now = monotonic()
        return HandlerTimes(self._began, self._asked, self._prepared, now, self._template_s, self._tokenizer_s)


def check_is_timeable(body: GenerationBody) -> None:
    """Raises InputError for a request whose time cannot be divided: a stream, or several answers."""
    if body.stream:
        raise InputError("stream is not supported by /bench: the times come with the whole answer", param="stream")
    for name in ("n", "best_of"):
        if (getattr(body, name, None) or 1) > 1:
            raise InputError(f"{name} must be 1 for /bench: it times a single answer", param=name)
    prompt = getattr(body, "prompt", None)
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        raise InputError("/bench takes one prompt: it times a single answer", param="prompt")


def timed_reply(reply: ChatCompletion | TextCompletion, trace: RequestTrace | None, times: HandlerTimes) -> Any:
    """The reply with its times."""
    fields = {name: getattr(reply, name) for name in reply.__struct_fields__}
    return TIMED[type(reply)](**fields, bench=None if trace is None else bench_times(trace, times))


def bench_times(trace: RequestTrace, times: HandlerTimes) -> BenchTimes:
    """Where the time of a request that has ended went."""
    parts = RequestParts(**{name: round(seconds, 6) for name, seconds in asdict(parts_of(trace, times)).items()})
    sums = [leg.sums for leg in trace.legs]
    laps = sum(one.prefill_laps + one.decode_laps for one in sums)
    num_stages = max((len(frame.stages) for leg in trace.legs for frame in leg.frames), default=0)
    first_s = trace.tokens_s[0] if trace.tokens_s else None
    reading_s = 0.0 if first_s is None else first_s - (trace.legs[0].began_s + sums[0].first_s if sums else 0.0)
    writing_s = trace.last_token_s - (first_s or 0.0)
    return BenchTimes(
        total_s=round(times.ended - times.began, 6),
        parts=parts,
        ttft_s=None if first_s is None else round(trace.entered_at - times.began + first_s, 6),
        prefill_tokens_per_s=_per_s(trace.prompt_tokens, reading_s),
        decode_tokens_per_s=_per_s(trace.output_tokens - 1, writing_s),
        prefill_laps=sum(one.prefill_laps for one in sums),
        decode_laps=sum(one.decode_laps for one in sums),
        hop_s=round(parts.hops_s / max(1, laps * num_stages), 7),
        trace_id=trace.trace_id,
        stages=trace_stats(trace)["stages"],
    )


def _per_s(count: int, seconds: float) -> float:
    return round(count / seconds, 2) if seconds > 0 and count > 0 else 0.0
