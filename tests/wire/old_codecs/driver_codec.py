"""Converts requests and token events to driver.proto and back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast, get_args

from exo_mesh.base.printable import printable
from exo_mesh.domain.embedding.spec import MAX_WIDTH, EmbedSpec, Pooling
from exo_mesh.domain.grammar import GrammarKind, GrammarSpec
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.request import (
    FLEX_PRIORITY,
    FinishReason,
    FrameTrace,
    GenerateRequest,
    PromptLogprob,
    PromptLogprobs,
    SamplingParams,
    StageSpan,
    ThinkingBudget,
    TokenEvent,
    TokenLogprob,
)
from exo_mesh.errors import PeerVersionError, TransportError
from exo_mesh.wire.proto import driver_pb2 as pb
from tests.wire.old_codecs.image_codec import spec_to_proto
from tests.wire.old_codecs.plan_codec import ballot_to_proto
from tests.wire.old_codecs.text_codec import (
    add_usage,
    piece_from_proto,
    piece_to_proto,
    respelling_from_proto,
    respelling_to_proto,
    text_from_proto,
    text_to_proto,
    usage_from_proto,
)

MAX_TOKEN_ID = 2**31 - 1
MAX_LOGPROBS = 20
MIN_REPETITION_PENALTY = 1e-3
MAX_CLIENT_CHARS = 64
MAX_SHARE_ID_CHARS = 256
MAX_PRIORITY = 10
HASH_BYTES = 32
MAX_MARKER_IDS = 256
MAX_BEGINNING_BYTES = 64 << 10


def request_to_proto(plan: Plan, request: GenerateRequest) -> pb.GenerateRequest:
    sampling = request.sampling
    message = pb.GenerateRequest(
        instance_id=plan.instance_id,
        ballot=ballot_to_proto(plan.ballot),
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        resume_ids=request.resume_ids,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        stop_ids=sorted(request.stop_ids),
        ignore_eos=request.ignore_eos,
        client=request.client,
        priority=request.priority,
        resumed=request.resumed,
        trace_id=request.trace_id,
        key_hash=request.key_hash,
        fingerprint=request.fingerprint,
        share_id=request.share_id,
        prompt_logprobs=request.prompt_logprobs,
        no_store=not request.is_kept,
        cache_scope=request.cache_scope,
        begins_with=request.begins_with.encode(),
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
            seed=sampling.seed,
            repetition_window=sampling.repetition_window,
        ),
    )
    if sampling.logprobs is not None:
        message.sampling.logprobs = sampling.logprobs
    if request.grammar is not None:
        message.grammar.CopyFrom(pb.Grammar(kind=request.grammar.kind, text=request.grammar.text.encode()))
    if (thinking := request.thinking) is not None:
        budget = pb.ThinkingBudget(end_ids=thinking.end_ids, tokens=thinking.tokens, start_ids=thinking.start_ids)
        message.thinking.CopyFrom(budget)
    if request.text is not None:
        message.text.CopyFrom(text_to_proto(request.text))
    if (embed := request.embed) is not None:
        message.embed.CopyFrom(
            pb.Embed(
                pooling=embed.pooling,
                normalise=embed.normalise,
                dimensions=embed.dimensions,
                whole=embed.whole,
                second=embed.second,
                choice=embed.choice,
            )
        )
    message.images.extend(spec_to_proto(picture.spec) for picture in request.pictures)
    return message


MAX_SCOPE_BYTES = 64


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Raises ValueError for an invalid request: it may come from any peer, and it shares frames with other requests.
    Its images are not in the result, because their pixels came before."""
    sampling = message.sampling
    _check_sampling(sampling)
    if message.prompt_logprobs > MAX_LOGPROBS:
        raise ValueError(f"prompt_logprobs is {message.prompt_logprobs}, more than {MAX_LOGPROBS}")
    if max((*message.prompt_ids, *message.resume_ids), default=0) > MAX_TOKEN_ID:
        raise ValueError(f"a token id is above {MAX_TOKEN_ID}")
    return GenerateRequest(
        request_id=message.request_id,
        prompt_ids=tuple(message.prompt_ids),
        resume_ids=tuple(message.resume_ids),
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_ids=frozenset(message.stop_ids),
        ignore_eos=message.ignore_eos,
        client=message.client[:MAX_CLIENT_CHARS],
        priority=max(FLEX_PRIORITY, min(message.priority, MAX_PRIORITY)),
        resumed=message.resumed,
        trace_id=message.trace_id[:MAX_CLIENT_CHARS],
        key_hash=_hash(message.key_hash),
        fingerprint=_hash(message.fingerprint),
        share_id=message.share_id[:MAX_SHARE_ID_CHARS],
        is_kept=not message.no_store,
        cache_scope=message.cache_scope[:MAX_SCOPE_BYTES],
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=_grammar(message.grammar) if message.HasField("grammar") else None,
        thinking=_thinking(message.thinking) if message.HasField("thinking") else None,
        text=text_from_proto(message.text) if message.HasField("text") else None,
        begins_with=_beginning(message.begins_with),
        embed=_embed(message.embed) if message.HasField("embed") else None,
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias),
            seed=sampling.seed,
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            repetition_window=sampling.repetition_window,
        ),
    )


def _beginning(value: bytes) -> str:
    if len(value) > MAX_BEGINNING_BYTES:
        raise ValueError(f"the output must begin with {len(value)} bytes, more than {MAX_BEGINNING_BYTES}")
    return value.decode()


def _grammar(message: pb.Grammar) -> GrammarSpec:
    if message.kind not in get_args(GrammarKind):
        raise ValueError(f'"{message.kind}" is not a kind of grammar')
    return GrammarSpec(cast(GrammarKind, message.kind), message.text.decode())


def _thinking(message: pb.ThinkingBudget) -> ThinkingBudget:
    ids = (*message.end_ids, *message.start_ids)
    if len(ids) > MAX_MARKER_IDS or max(ids, default=0) > MAX_TOKEN_ID:
        raise ValueError(
            f"the thinking markers have {len(ids)} token ids, more than {MAX_MARKER_IDS}, or too large ones"
        )
    return ThinkingBudget(tuple(message.end_ids), message.tokens, tuple(message.start_ids))


def _embed(message: pb.Embed) -> EmbedSpec:
    if message.pooling not in get_args(Pooling):
        raise ValueError(f'"{printable(message.pooling, 40)}" is not a kind of pooling')
    pooling = cast(Pooling, message.pooling)
    choice = tuple(message.choice)
    return EmbedSpec(pooling, message.normalise, message.dimensions, message.whole, message.second, choice)


def _vector(values: bytes) -> bytes:
    """Raises TransportError for bytes that are not the values of a vector."""
    if not 0 < len(values) <= 4 * MAX_WIDTH or len(values) % 4:
        raise TransportError(f"the driver sent a vector of {len(values)} bytes, not of 1 to {MAX_WIDTH} float32 values")
    return values


def _hash(value: bytes) -> bytes:
    if len(value) not in (0, HASH_BYTES):
        raise ValueError(f"a hash must have {HASH_BYTES} bytes, not {len(value)}")
    return value


def event_to_proto(event: TokenEvent) -> pb.TokenEvent:
    message = pb.TokenEvent(index=event.index, finish=event.finish or "", cached=event.cached)
    if event.token_id is not None:
        message.token_id = event.token_id
    if event.logprob is not None:
        message.logprob = event.logprob
        message.top.extend(pb.TokenLogprob(token_id=top.token_id, logprob=top.logprob) for top in event.top)
    if event.piece is not None:
        message.piece.CopyFrom(piece_to_proto(event.piece))
    if event.respelling is not None:
        message.respelling.CopyFrom(respelling_to_proto(event.respelling))
    if event.usage is not None:
        add_usage(message, event.usage)
    if event.vector is not None:
        message.vector = event.vector
    return message


def _check_sampling(sampling: pb.Sampling) -> None:
    ranges = {
        "temperature": (0.0, math.inf),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (MIN_REPETITION_PENALTY, math.inf),
        "presence_penalty": (-math.inf, math.inf),
        "frequency_penalty": (-math.inf, math.inf),
    }
    for name, (least, most) in ranges.items():
        value = getattr(sampling, name)
        if not (math.isfinite(value) and least <= value <= most):
            raise ValueError(f"{name} is {value}, not between {least:g} and {most:g}")
    if not all(math.isfinite(entry.bias) for entry in sampling.logit_bias):
        raise ValueError("every bias in logit_bias must be a finite number")
    if sampling.logprobs > MAX_LOGPROBS:
        raise ValueError(f"logprobs is {sampling.logprobs}, more than {MAX_LOGPROBS}")


def prompt_to_proto(entries: Iterable[PromptLogprob]) -> list[pb.PromptLogprob]:
    return [
        pb.PromptLogprob(
            index=entry.index,
            logprob=entry.logprob,
            top=[pb.TokenLogprob(token_id=top.token_id, logprob=top.logprob) for top in entry.top],
        )
        for entry in entries
    ]


def prompt_from_proto(messages: Iterable[pb.PromptLogprob]) -> PromptLogprobs:
    return PromptLogprobs(
        tuple(
            PromptLogprob(
                message.index,
                message.logprob,
                tuple(TokenLogprob(entry.token_id, entry.logprob) for entry in message.top),
            )
            for message in messages
        )
    )


def traces_to_proto(frames: Iterable[FrameTrace]) -> list[pb.FrameTrace]:
    return [
        pb.FrameTrace(
            step=frame.step,
            is_prefill=frame.is_prefill,
            rows=frame.rows,
            tokens=frame.tokens,
            sent_s=frame.sent_s,
            lap_s=frame.lap_s,
            stages=[pb.StageSpan(waited_s=stage.waited_s, compute_s=stage.compute_s) for stage in frame.stages],
        )
        for frame in frames
    ]


def trace_from_proto(message: pb.FrameTrace) -> FrameTrace:
    stages = tuple(StageSpan(stage.waited_s, stage.compute_s) for stage in message.stages)
    return FrameTrace(
        message.step, message.is_prefill, message.rows, message.tokens, message.sent_s, message.lap_s, stages
    )


def event_from_proto(message: pb.TokenEvent) -> TokenEvent:
    """Raises PeerVersionError for a finish reason that only a newer version knows, and TransportError for a vector of
    an impossible size."""
    return TokenEvent(
        index=message.index,
        token_id=message.token_id if message.HasField("token_id") else None,
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple(TokenLogprob(entry.token_id, entry.logprob) for entry in message.top),
        finish=_finish(message.finish) if message.finish else None,
        piece=piece_from_proto(message.piece) if message.HasField("piece") else None,
        usage=usage_from_proto(message) if message.finish else None,
        respelling=respelling_from_proto(message.respelling) if message.HasField("respelling") else None,
        cached=message.cached,
        vector=_vector(message.vector) if message.HasField("vector") else None,
    )


def _finish(text: str) -> FinishReason:
    if text not in set(FinishReason):
        raise PeerVersionError(
            f'the driver sent the finish reason "{printable(text, 40)}", which this version does not know'
        )
    return FinishReason(text)
