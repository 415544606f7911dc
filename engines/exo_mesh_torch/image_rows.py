"""Where the images of sequences lie in a forward: positions, masks, and rows in place of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from exo_mesh.domain.images import PictureSpec
from exo_mesh_torch.calls import find_cache_argument
from exo_mesh_torch.vision import ImageRows


class ShownImage(msgspec.Struct):
    """An image of a sequence. rows: its tokens on the first stage, until they are computed; None otherwise."""

    spec: PictureSpec
    rows: ImageRows | None = None


class Overlay(msgspec.Struct, frozen=True):
    """The image tokens in one forward. where: bool `[batch, n]`; embeds: `[tokens, hidden]`, in the order of `where`;
    deep: see ImageRows."""

    where: torch.Tensor
    embeds: torch.Tensor
    deep: tuple[torch.Tensor, ...]


def overlaps(images: Sequence[ShownImage], pos0: int, n: int) -> bool:
    """Whether a row has tokens of an image."""
    return any(image.spec.start < pos0 + n and pos0 < image.spec.stop for image in images)


def cut_image(images: Sequence[ShownImage], pos0: int, n: int) -> PictureSpec | None:
    """An image that must be whole and that a row has only in part; None if there is none."""
    for image in images:
        spec = image.spec
        if spec.is_whole and (spec.start < pos0 < spec.stop or spec.start < pos0 + n < spec.stop):
            return spec
    return None


def overlay(images: Sequence[ShownImage], pos0: int, n: int, device: torch.device) -> Overlay | None:
    """The image tokens of a row of one sequence, `[1, n]`; None if it has none."""
    where = torch.zeros((1, n), dtype=torch.bool, device=device)
    parts = []
    for image in images:
        start, stop = max(image.spec.start, pos0), min(image.spec.stop, pos0 + n)
        if start < stop and image.rows is not None:
            where[0, start - pos0 : stop - pos0] = True
            parts.append(image.rows.part(start - image.spec.start, stop - image.spec.start))
    if not parts:
        return None
    deep = tuple(torch.cat(level) for level in zip(*(part.deep for part in parts), strict=True))
    return Overlay(where, torch.cat([part.embeds for part in parts]), deep)


def grid_positions(images: Sequence[ShownImage], pos0: int, n: int) -> torch.Tensor:
    """int64 `[3, n]`: time, row and column of the positions from pos0 on. The tokens of an image have one time, and its
    rows and columns count from there; the text behind it goes on after the larger of the two."""
    place = torch.arange(pos0, pos0 + n).expand(3, n).clone()
    found = place.clone()
    saved = 0
    for image in images:
        spec = image.spec
        inside = (place[0] >= spec.start) & (place[0] < spec.stop)
        index = place[0][inside] - spec.start
        first = spec.start - saved
        found[:, inside] = first + torch.stack([0 * index, index // spec.columns, index % spec.columns])
        saved += spec.num_tokens - max(spec.rows, spec.columns)
        behind = place[0] >= spec.stop
        found[:, behind] = place[:, behind] - saved
    return found


def two_way_masks(
    config: Any, images: Sequence[ShownImage], length: int, n: int, cache: Any, hidden: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """Masks by kind of layer, in which the tokens of an image attend to each other, as transformers makes them for
    Gemma 3. length: positions before the row. hidden: any tensor `[1, n, …]` of the layers' dtype."""
    from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

    blocks = torch.full((1, length + n), -1, device=hidden.device)
    for index, image in enumerate(images):
        blocks[0, image.spec.start : image.spec.stop] = index
    positions = torch.arange(length, length + n, device=hidden.device)[None]
    masks: dict[str, torch.Tensor | None] = create_masks_for_vision_model(
        config=config,
        inputs_embeds=hidden,
        attention_mask=None,
        position_ids=positions,
        block_sequence_ids=blocks,
        **{find_cache_argument(create_masks_for_vision_model) or "cache": cache},
    )
    return masks
