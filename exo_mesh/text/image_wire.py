"""Messages between a node and its renderer process about images."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_SOURCE_PIXELS = 36_000_000
"""Most pixels of an image as it is sent. Decoding one takes about 9 bytes for each, and a process has 512 MiB."""

MAX_SOURCE_BYTES = 16 << 20
"""Most bytes of an image file."""

MAX_ASPECT = 200
"""Most times that an image may be as long as it is wide."""


class ImageRecipe(msgspec.Struct, frozen=True):
    """How an image is made to fit a model. kind: "exact": resized to height x width; "crop": resized until its shorter
    side is `shortest`, then the middle height x width is taken; "grid": resized to multiples of `factor` with about the
    same sides, so that it has min_pixels to max_pixels. resample: Pillow's number of the filter."""

    kind: Literal["exact", "crop", "grid"]
    height: int = 0
    width: int = 0
    shortest: int = 0
    factor: int = 0
    min_pixels: int = 0
    max_pixels: int = 0
    resample: int = 3

    def with_filter(self, resample: Any) -> ImageRecipe:
        """The recipe with another filter. Raises ValueError for a filter that Pillow does not have."""
        if resample not in range(6):
            raise ValueError(f"resample is {resample!r}, which is not a filter")
        return msgspec.structs.replace(self, resample=resample)


class DecodeImage(msgspec.Struct, tag="image", frozen=True):
    """Decode an image file, and resize it. where: its place in the client's body, for errors. data: a long file is sent
    before, in parts."""

    data: bytes
    recipe: ImageRecipe
    where: str
    limit_s: float


class ImageDecoded(msgspec.Struct, tag="decoded", frozen=True):
    """The image. pixels: uint8 `[height, width, 3]`."""

    height: int
    width: int
    pixels: bytes
