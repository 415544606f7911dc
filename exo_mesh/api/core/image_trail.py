"""Follows images for people who look for a mistake: a line in the log for each, and files of what the model gets."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from exo_mesh.domain.images import digest_of
from exo_mesh.text.image_wire import ImageDecoded

MAX_FILES = 200
"""Most images that are kept in the directory; the oldest are deleted."""

_log = logging.getLogger(__name__)


class ImageTrail(msgspec.Struct, frozen=True):
    """logs: write a line for each image. directory: where each image is written as the vision tower gets it; None:
    nowhere."""

    logs: bool = False
    directory: Path | None = None

    def note(self, where: str, num_bytes: int, image: ImageDecoded) -> None:
        """Note one image. where: its place in the client's body; num_bytes: of the file that the client sent. Blocks,
        and never raises: a full disk only makes a line in the log."""
        digest = digest_of(image.pixels)
        if self.logs:
            _log.info(
                "image %s: %d bytes, decoded to %d x %d pixels, SHA-256 %s", where, num_bytes, image.width,
                image.height, digest,
            )  # fmt: skip
        if self.directory is not None:
            try:
                self._save(self.directory, digest, image)
            except OSError as exc:
                _log.warning("an image cannot be written to %s: %s", self.directory, exc.strerror or exc)

    def _save(self, directory: Path, digest: str, image: ImageDecoded) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / f"{digest[:32]}.ppm").write_bytes(b"P6 %d %d 255\n" % (image.width, image.height) + image.pixels)
        files = sorted(directory.glob("*.ppm"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[: max(0, len(files) - MAX_FILES)]:
            file.unlink(missing_ok=True)
