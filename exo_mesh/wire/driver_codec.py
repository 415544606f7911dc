"""Converts requests and token events to driver.proto and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from exo_mesh.domain.images import MAX_PICTURES, ImagePiece, PictureSpec
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.request import (
    FrameTrace,
    GenerateRequest,
    PrefixReport,
    PromptLogprob,
    PromptLogprobs,
    TokenEvent,
)
from exo_mesh.domain.whole.text_pieces import TextUsage
from exo_mesh.errors import TransportError
from exo_mesh.wire.message_codec import Codec, by_hand
from exo_mesh.wire.plan_codec import ballot_to_proto
from exo_mesh.wire.proto import driver_pb2 as pb

REQUEST = Codec(
    GenerateRequest, pb.GenerateRequest, besides=["instance_id", "ballot", "images", "no_store", "no_drafts"]
)
PROMPT_LOGPROB = Codec(PromptLogprob, pb.PromptLogprob)
TRACE = Codec(FrameTrace, pb.FrameTrace)
PREFIX = Codec(PrefixReport, pb.PrefixReport)
PICTURE = Codec(PictureSpec, pb.Image)
PIECE = Codec(ImagePiece, pb.ImagePiece)
EVENT = Codec(TokenEvent, pb.TokenEvent, error=TransportError)

event_from_proto = EVENT.read
trace_from_proto, prefix_to_proto, prefix_from_proto = TRACE.read, PREFIX.write, PREFIX.read


def request_to_proto(plan: Plan, request: GenerateRequest) -> pb.GenerateRequest:
    return REQUEST.write(
        request,
        instance_id=plan.instance_id,
        ballot=ballot_to_proto(plan.ballot),
        images=[PICTURE.write(picture.spec) for picture in request.pictures],
        no_store=not request.is_kept,
        no_drafts=not request.drafts,
    )


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Raises ValueError for an invalid request: it may come from any peer, and it shares frames with other requests.
    Its images are not in the result, because their pixels came before."""
    return REQUEST.read(message, is_kept=not message.no_store, drafts=not message.no_drafts)


def specs_from_proto(messages: Sequence[pb.Image]) -> tuple[PictureSpec, ...]:
    """The images of a request. Raises ValueError for an invalid image or too many."""
    if len(messages) > MAX_PICTURES:
        raise ValueError(f"{len(messages)} images are more than {MAX_PICTURES}")
    return tuple(PICTURE.read(message) for message in messages)


def prompt_to_proto(entries: Iterable[PromptLogprob]) -> list[pb.PromptLogprob]:
    return [PROMPT_LOGPROB.write(entry) for entry in entries]


def prompt_from_proto(messages: Iterable[pb.PromptLogprob]) -> PromptLogprobs:
    return PromptLogprobs(tuple(PROMPT_LOGPROB.read(message) for message in messages))


def traces_to_proto(frames: Iterable[FrameTrace]) -> list[pb.FrameTrace]:
    return [TRACE.write(frame) for frame in frames]


def event_to_proto(event: TokenEvent) -> pb.TokenEvent:
    """A token without more is written by hand: the driver does it for most tokens, in 0.8 us instead of 1.7."""
    has_text = event.piece is not None or event.respelling is not None
    if has_text or event.logprob is not None or event.usage is not None or event.vector is not None or event.finish:
        return EVENT.write(event)
    return pb.TokenEvent(index=event.index, token_id=event.token_id, cached=event.cached)


def _usage_to_proto(usage: TextUsage | None) -> dict[str, Any]:
    if usage is None:
        return {}
    stop_string = usage.stop_string.encode("utf-8", "surrogatepass")
    return {
        "prompt_tokens": usage.prompt_tokens,
        "output_tokens": usage.output_tokens,
        "stop_string": stop_string,
    }


def _usage_from_proto(message: pb.TokenEvent) -> TextUsage | None:
    """What the last event says of the answer; None if it says nothing, or is not the last."""
    if not message.finish:
        return None
    prompt_tokens = message.prompt_tokens if message.HasField("prompt_tokens") else None
    output_tokens = message.output_tokens if message.HasField("output_tokens") else None
    if prompt_tokens is None and output_tokens is None and not message.stop_string:
        return None
    return TextUsage(prompt_tokens, output_tokens, message.stop_string.decode("utf-8", "surrogatepass"))


by_hand(TextUsage, _usage_from_proto, _usage_to_proto, "prompt_tokens", "output_tokens", "stop_string")
