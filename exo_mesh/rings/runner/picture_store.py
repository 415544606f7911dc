"""Keeps the pixels that entry peers have sent until the requests with their images come."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.domain.images import (
    CHANNELS,
    MAX_PIXELS,
    MAX_REQUEST_PIXEL_BYTES,
    ImagePiece,
    Picture,
    PictureSpec,
    PixelBudget,
)
from exo_mesh.errors import InputError, OverloadError

KEEP_S = 60.0
"""How long pixels wait for their request, which follows at once."""

MAX_WAITING_BYTES = 4 * MAX_REQUEST_PIXEL_BYTES
"""Most bytes of pixels that wait for requests; the oldest are dropped."""

MAX_UPLOADS = 8
"""Most images that are received at a time; others wait."""

MAX_IMAGE_BYTES = MAX_PIXELS * CHANNELS


class PictureStore:
    """Pixels by their digest. Memory is bounded: MAX_WAITING_BYTES here, and a PixelBudget for live requests."""

    def __init__(self, budget: PixelBudget | None = None, clock: Clock = monotonic) -> None:
        self._budget = budget or PixelBudget()
        self._clock = clock
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)
        self._waiting: OrderedDict[str, tuple[float, bytes]] = OrderedDict()

    async def receive(self, pieces: AsyncIterator[ImagePiece]) -> None:
        """Assemble the pixels of one image. Raises InputError if they are not what the first piece said. The caller has
        a deadline."""
        async with self._uploads:
            await self._receive(pieces)

    async def _receive(self, pieces: AsyncIterator[ImagePiece]) -> None:
        digest, num_bytes, pixels, found = "", 0, bytearray(), hashlib.sha256()
        async for piece in pieces:
            if not digest:
                digest, num_bytes = piece.digest, piece.num_bytes
                if not 0 < num_bytes <= MAX_IMAGE_BYTES:
                    raise InputError(f"an image of {num_bytes} bytes of pixels; at most {MAX_IMAGE_BYTES} are allowed")
            if len(pixels) + len(piece.pixels) > num_bytes:
                raise InputError(f"an image has more than the {num_bytes} bytes of pixels that were announced")
            pixels += piece.pixels
            found.update(piece.pixels)
        if len(pixels) != num_bytes or found.hexdigest() != digest:
            raise InputError(
                f"the {len(pixels)} bytes of pixels that arrived are not the {num_bytes} that were announced"
            )
        self._waiting[digest] = (self._clock(), bytes(pixels))
        self._waiting.move_to_end(digest)
        self._drop()

    def pictures(self, specs: tuple[PictureSpec, ...]) -> tuple[Picture, ...]:
        """The images of a request, which count as held as long as it lives. Raises OverloadError if pixels were dropped
        before, or if live requests hold too much."""
        self._drop()
        found = []
        for spec in specs:
            if spec.digest not in self._waiting:
                raise OverloadError("the pixels of an image were dropped before its request came; try again")
            try:
                picture = Picture(spec, self._waiting[spec.digest][1])
            except ValueError as exc:
                raise InputError(str(exc)) from exc
            found.append(self._budget.hold(picture))
        return tuple(found)

    def _drop(self) -> None:
        now, total = self._clock(), sum(len(pixels) for _, pixels in self._waiting.values())
        for digest, (since, pixels) in list(self._waiting.items()):
            if total > MAX_WAITING_BYTES or now - since > KEEP_S:
                total -= len(pixels)
                del self._waiting[digest]
