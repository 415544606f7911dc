"""Caches the small text files of models that only other peers have, below the home directory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from contextlib import aclosing
from pathlib import Path

from exo_mesh.base.printable import quoted
from exo_mesh.base.tasks import SharedCalls
from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import MeshError, ModelError, TransportError, UnknownModelError
from exo_mesh.machine.disk import Disk
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.calls import read_text_files
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.weights.card import IMAGE_FILES, LATER_TEXT_FILES, TEXT_FILES

ROOM_BYTES = 48 * 1024 * 1024
"""Free space that is needed before a fetch starts; most tokenizers have less than 20 MB."""
MAX_BYTES = 256 * 1024 * 1024
"""Most bytes of all text files of one model together; the largest tokenizers have about 40 MB."""


class TextCache:
    """Keeps one directory per digest of text files: models with equal weights may differ in their chat template."""

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        membership: Membership,
        disk: Disk | None = None,
        spare_root: Path | None = None,
    ) -> None:
        """spare_root: where files are written while the disk of `root` is full; by default a temporary directory."""
        self._root = root
        self._disk = disk or Disk(root)
        self._spare_root = spare_root
        self._spared: dict[str, Path] = {}
        self._catalogue = catalogue
        self._membership = membership
        self._turn = asyncio.Lock()
        self._lookups: SharedCalls[Path] = SharedCalls()

    def fetched(self, card: ModelCard) -> Path | None:
        """Returns the directory of the text files of a peer's model, if they were fetched already."""
        directory = self._root / _directory_name(card)
        return directory if directory.is_dir() else None

    async def directory(self, name: str) -> Path:
        """Returns the directory of a model's text files, fetched from a peer if necessary. Raises MeshErrors."""
        card = await self._catalogue.card(name)
        try:
            return await self._lookups.get(name, lambda: asyncio.to_thread(self._catalogue.local_dir, name))
        except (UnknownModelError, ModelError):  # then a peer has the card
            pass
        digest = _directory_name(card)
        async with self._turn:
            for known in (self._root / digest, self._spared.get(digest)):
                if known is not None and known.is_dir():
                    return known
            try:
                if not await asyncio.to_thread(self._disk.has_room, ROOM_BYTES):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return await self._fetch(name, self._root / digest)
            except OSError as exc:
                self._disk.failed(exc, "the tokenizer of a peer's model")
            try:
                spare = self._spare_root or Path(tempfile.mkdtemp(prefix="exo-mesh-"))
                self._spare_root = spare
                self._spared[digest] = await self._fetch(name, spare / digest)
            except OSError as exc:
                raise ModelError(f"the tokenizer of {name} cannot be stored: {exc.strerror or exc}") from exc
            return self._spared[digest]

    def close(self) -> None:
        """Deletes everything in the spare directory."""
        for directory in self._spared.values():
            shutil.rmtree(directory, ignore_errors=True)
        if self._spare_root is not None:
            with contextlib.suppress(OSError):
                self._spare_root.rmdir()

    async def _fetch(self, name: str, target: Path) -> Path:
        """Fetches the files from the first peer that has them. Raises OSError if writing fails, and MeshErrors."""
        failure: MeshError = TransportError(f"no live peer has the text files of {name}")
        for peer_id in self._catalogue.holders(name):
            peer = self._membership.peer(peer_id)
            if peer is None:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix="fetch-", dir=target.parent))
            try:
                await self._receive(peer.id, name, scratch)
                await asyncio.to_thread(scratch.rename, target)
                return target
            except MeshError as exc:
                failure = exc
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        raise failure

    async def _receive(self, peer_id: str, name: str, directory: Path) -> None:
        """Receives the files. Raises TransportError if the peer sends anything but the allowed files."""
        num_bytes = 0
        async with aclosing(read_text_files(self._membership.calls, peer_id, name)) as files:
            async for file_name, chunk in files:
                num_bytes += len(chunk)
                if file_name not in (*TEXT_FILES, *IMAGE_FILES, *LATER_TEXT_FILES) or num_bytes > MAX_BYTES:
                    sent = f"{quoted(file_name, 80)} ({num_bytes} bytes in all)"
                    raise TransportError(f"a peer sent {sent} as a text file of {name}")
                with (directory / file_name).open("ab") as file:
                    file.write(chunk)
        if not (directory / "tokenizer.json").is_file():
            raise ModelError(f"the peer has no tokenizer.json of {name}")


def _directory_name(card: ModelCard) -> str:
    """The digest of a model's text files, hashed again, because a peer's text must not become a path."""
    return hashlib.sha256(str(card.text_digest).encode()).hexdigest()[:32]
