"""Converts images of a prompt, without their pixels, to driver.proto and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from exo_mesh.domain.images import MAX_PICTURES, PictureSpec
from exo_mesh.wire.proto import driver_pb2 as pb


def spec_to_proto(spec: PictureSpec) -> pb.Image:
    return pb.Image(
        start=spec.start,
        num_tokens=spec.num_tokens,
        rows=spec.rows,
        columns=spec.columns,
        height=spec.height,
        width=spec.width,
        mean=spec.mean,
        std=spec.std,
        digest=spec.digest,
        is_whole=spec.is_whole,
    )


def specs_from_proto(messages: Sequence[pb.Image]) -> tuple[PictureSpec, ...]:
    """Raises ValueError for an invalid image or too many."""
    if len(messages) > MAX_PICTURES:
        raise ValueError(f"{len(messages)} images are more than {MAX_PICTURES}")
    return tuple(
        PictureSpec(
            message.start,
            message.num_tokens,
            message.rows,
            message.columns,
            message.height,
            message.width,
            _channels(message.mean),
            _channels(message.std),
            message.digest,
            message.is_whole,
        )
        for message in messages
    )


def _channels(values: Iterable[float]) -> tuple[float, float, float]:
    red, green, blue = values
    return red, green, blue
