"""Puts the images of a conversation into its prompt: decoded, resized, with placeholders for their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from exo_mesh.api.core.request import Conversation
from exo_mesh.api.core.texts import TextModels
from exo_mesh.domain.images import MAX_PICTURES, MAX_REQUEST_PIXEL_BYTES, Picture, PixelBudget
from exo_mesh.errors import InputError
from exo_mesh.text.control_text import ChatPrompt
from exo_mesh.text.tokenizer import TextModel
from exo_mesh.text.vision import VisionSpec

BUDGET = PixelBudget()
"""Of all live requests of this node."""


class DecodedImages(msgspec.Struct, frozen=True):
    """The images of one conversation, as the model's vision tower wants them. sizes: (height, width, pixels)."""

    spec: VisionSpec
    images: Sequence[tuple[int, int, bytes]]

    def spread(self, prompt: ChatPrompt) -> ChatPrompt:
        """The prompt with the text around each image. Raises InputError."""
        return replace(prompt, marked=self.spec.spread_markers(prompt.marked, len(self.images)))

    def written_out(self, prompt: ChatPrompt, text: TextModel) -> ChatPrompt:
        """The prompt with every placeholder of every image, as text. Raises InputError."""
        image = str(text.tokenizer.id_to_token(self.spec.image_id))
        first, *rest = self.spread(prompt).marked.split(image)
        counts = [math.prod(self.spec.grid(height, width)) for height, width, _ in self.images]
        pieces = (image * count + piece for count, piece in zip(counts, rest, strict=True))
        return replace(prompt, marked=first + "".join(pieces))

    def place(self, ids: Sequence[int]) -> tuple[list[int], tuple[Picture, ...]]:
        """The ids with all placeholders, and the images, which count in the node's budget. Raises InputError, or
        OverloadError if live requests hold too many."""
        placed, pictures = self.spec.place(ids, self.images)
        return placed, tuple(map(BUDGET.hold, pictures))


async def decoded_images(
    conversation: Conversation, model: str, text: TextModel, texts: TextModels
) -> DecodedImages | None:
    """Decode the images of a conversation; None if it has none. Raises InputError if the model takes no images, or for
    an image that cannot be read."""
    given = conversation.images
    if not given:
        return None
    where = given[0].where
    if isinstance(text.vision, str):
        raise InputError(f"{where}: {model} takes no images: {text.vision}", param=where)
    if len(given) > MAX_PICTURES:
        raise InputError(f"there are {len(given)} images; at most {MAX_PICTURES} are allowed", param=where)
    found, total = [], 0
    for image in given:
        decoded = await texts.decode_image(image, text.vision.recipe)
        total += len(decoded.pixels)
        if total > MAX_REQUEST_PIXEL_BYTES:
            message = f"the images have more than {MAX_REQUEST_PIXEL_BYTES} bytes of pixels together; send fewer"
            raise InputError(message, param=image.where)
        found.append((decoded.height, decoded.width, decoded.pixels))
    return DecodedImages(text.vision, found)
