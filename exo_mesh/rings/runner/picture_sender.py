"""Sends the images of sequences round the ring, before the rows with their tokens. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ordered

from exo_mesh.domain.frame import ShowImage
from exo_mesh.domain.images import Picture
from exo_mesh.rings.runner.scheduling.sequence import Sequence


class PictureSender:
    """The images that have not been sent yet. One at a time is on its way: frames with pixels are much larger than all
    others that the driver sends, and must not fill the connection to the first stage.

    A sequence computes nothing until its last image has been sent. Operations and rows are done in order at every
    stage, so nobody waits for the image to come round.
    """

    def __init__(self) -> None:
        self._unsent: deque[tuple[Sequence, Picture]] = deque()
        self._step = 0
        """The frame with an image that is on its way; 0 if there is none."""

    def begin(self, sequence: Sequence, pictures: Ordered[Picture]) -> None:
        """Queue the images of a sequence that has just been inserted at the stages."""
        self.forget(sequence.id)
        sequence.awaits_images = bool(pictures)
        self._unsent.extend((sequence, picture) for picture in pictures)

    def next(self) -> tuple[ShowImage, Picture] | None:
        """Take the next image, or None while there is none or one is on its way. The caller sends it at once."""
        if self._step or not self._unsent:
            return None
        sequence, picture = self._unsent.popleft()
        sequence.awaits_images = any(other is sequence for other, _ in self._unsent)
        return ShowImage(sequence.id, picture.spec), picture

    def sent(self, step: int) -> None:
        """Note that this frame carries an image."""
        self._step = step

    def came_round(self, step: int) -> None:
        """Note that a frame is back."""
        if step == self._step:
            self._step = 0

    def forget(self, sequence_id: int) -> None:
        """Drop the images of a sequence that has ended, lost its place, or continues under another id."""
        dropped = [sequence for sequence, _ in self._unsent if sequence.id == sequence_id]
        if dropped:
            dropped[0].awaits_images = False
            self._unsent = deque(entry for entry in self._unsent if entry[0].id != sequence_id)

    def restart(self) -> None:
        """Forget all: no frame comes round any more, and every running sequence begins again."""
        for sequence, _ in self._unsent:
            sequence.awaits_images = False
        self._unsent.clear()
        self._step = 0
