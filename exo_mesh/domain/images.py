"""Images in a prompt: where their tokens are, and the pixels from which the first stage computes those tokens."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from exo_mesh.errors import OverloadError

CHANNELS = 3

MAX_PIXELS = 4 * 1024 * 1024
"""Most pixels of one image after it was resized for the model: 12 MiB in a frame."""

MAX_PICTURES = 32
"""Most images of one request."""

MAX_REQUEST_PIXEL_BYTES = 64 * 1024 * 1024
"""Most bytes of pixels of one request."""

PIECE_BYTES = 512 * 1024
"""Most bytes of pixels in one message."""

MAX_HELD_BYTES = 512 * 1024 * 1024
"""Most bytes of pixels that one process holds for all live requests together."""

DIGEST_CHARS = 64
_ABOVE_IDS = 1 << 31


class PictureSpec(msgspec.Struct, frozen=True, array_like=True):
    """The part of an image that every stage needs: its tokens in the prompt. The pixels are needed by the first stage.

    start: position of its first token; num_tokens: its tokens, one after the other, `rows * columns` of them where the
    model counts positions in two dimensions. height, width: of the pixels. mean, std: the pixels divided by 255 are
    normalised per channel with these. digest: SHA-256 of the pixels, 64 hex digits; two equal specs have the same
    tokens. is_whole: its tokens attend to each other, so a row has all of them or none.
    """

    start: int
    num_tokens: int
    rows: int
    columns: int
    height: int
    width: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    digest: str
    is_whole: bool = False

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_tokens < 1 or min(self.rows, self.columns) < 1:
            raise ValueError(f"bad image: start={self.start} num_tokens={self.num_tokens}")
        if min(self.height, self.width) < 1 or self.height * self.width > MAX_PIXELS:
            raise ValueError(f"bad image: {self.width} x {self.height} pixels; at most {MAX_PIXELS} are allowed")
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise ValueError(f"bad image: mean {list(self.mean)}, standard deviation {list(self.std)}")
        if len(self.digest) != DIGEST_CHARS:
            raise ValueError("bad image: its digest does not have 64 hex digits")

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of its pixels: one per channel."""
        return self.height * self.width * CHANNELS

    def words(self) -> list[int]:
        """One number for each of its tokens, above all token ids and below 2^32: two images of different digests, sizes
        or normalisation have different ones."""
        fields = [self.rows, self.columns, self.height, self.width, list(self.mean), list(self.std), self.digest]
        found = hashlib.sha256(msgspec.json.encode(fields)).digest()
        eight = [_ABOVE_IDS | int.from_bytes(found[at : at + 4], "big") for at in range(0, len(found), 4)]
        return (eight * (self.num_tokens // len(eight) + 1))[: self.num_tokens]


def digest_of(pixels: bytes) -> str:
    """The digest of an image's pixels."""
    return hashlib.sha256(pixels).hexdigest()


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Picture:
    """An image of a request. pixels: uint8 `[height, width, 3]`, row by row, not normalised; not shown, as private as
    text."""

    spec: PictureSpec
    pixels: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.pixels) != self.spec.num_bytes:
            raise ValueError(f"an image of {self.spec.num_bytes} bytes has {len(self.pixels)} bytes of pixels")


def content_of_prompt(tokens: Sequence[int], pictures: Sequence[PictureSpec]) -> list[int]:
    """The content that decides the KV of a prompt's first positions: token ids, and in place of an image's ids its
    digest. tokens: all of the prompt, or its beginning."""
    found = list(tokens)
    for picture in pictures:
        found[picture.start : picture.stop] = picture.words()[: max(0, min(len(tokens), picture.stop) - picture.start)]
    return found


def pictures_defect(pictures: Sequence[PictureSpec], num_prompt: int) -> str | None:
    """The reason why a request cannot have these images, or None. num_prompt: tokens of its prompt."""
    if len(pictures) > MAX_PICTURES:
        return f"{len(pictures)} images are more than the {MAX_PICTURES} that one request may have"
    if (total := sum(picture.num_bytes for picture in pictures)) > MAX_REQUEST_PIXEL_BYTES:
        return f"the images have {total} bytes of pixels; one request may have {MAX_REQUEST_PIXEL_BYTES}"
    stop = 0
    for picture in pictures:
        if picture.start < stop:
            return "the tokens of two images overlap"
        stop = picture.stop
    # the last prompt token is a decode row, which has no image
    return "an image lies behind the prompt" if stop >= max(num_prompt, 1) and pictures else None


def whole_row(pictures: Sequence[PictureSpec], pos0: int, n: int) -> int:
    """The tokens of a prefill row that begins at pos0 and would have n tokens, so that it does not end inside an
    image that must be whole: fewer, or more if it begins with the image."""
    for picture in pictures:
        if picture.is_whole and picture.start < pos0 + n < picture.stop:
            return picture.start - pos0 if picture.start > pos0 else picture.stop - pos0
    return n


class ImagePiece(msgspec.Struct, frozen=True):
    """A part of the pixels of an image. digest, num_bytes: of all its pixels; only the first piece says them."""

    digest: str = ""
    num_bytes: int = 0
    pixels: bytes = b""


def pieces_of(picture: Picture) -> Iterator[ImagePiece]:
    """The pixels of an image in pieces of PIECE_BYTES."""
    digest, size = picture.spec.digest, len(picture.pixels)
    for start in range(0, size, PIECE_BYTES):
        yield ImagePiece(digest, size, picture.pixels[start : start + PIECE_BYTES])
        digest, size = "", 0


class PixelBudget:
    """Refuses images beyond a number of bytes, counting all that something still refers to."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: weakref.WeakSet[Picture] = weakref.WeakSet()

    @property
    def held_bytes(self) -> int:
        return sum(len(picture.pixels) for picture in self._held)

    def hold(self, picture: Picture) -> Picture:
        """Count an image for as long as it lives, and return it. Raises OverloadError if it does not fit."""
        held = self.held_bytes
        if held + len(picture.pixels) > self._max_bytes:
            raise OverloadError(
                f"live requests hold {held} bytes of images here, of at most {self._max_bytes}; try again later"
            )
        self._held.add(picture)
        return picture
