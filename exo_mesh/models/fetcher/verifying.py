"""Compares files of which only parts are here with the digest of the whole file.

The bytes that are here are hashed in their order, and between them those of other sources, of which nothing is kept. If
the digest is wrong, the whole file is read from one source after the other until the wrong bytes are known; those here
are dropped and replaced by that source's.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from exo_mesh.domain.spans import Span, Spans, common, cut, merged, minus
from exo_mesh.errors import CancelledRequestError, FetchError, MeshError
from exo_mesh.models.fetcher.download import CHUNK_BYTES, TRIES_BEFORE_OTHERS, Context, UsedSource, read_persistently
from exo_mesh.models.fetcher.source import NoRangesError
from exo_mesh.models.fetcher.writing import ModelWriter
from exo_mesh.weights.safetensors import on_disk

RIGHT, UNKNOWN, REPAIRED = "right", "unknown", "repaired"
"""What a check found: all bytes here belong to a file with the right digest; no source has the rest of the file now;
wrong bytes were here and are replaced."""

PIECE_BYTES = 2**20
"""Wrong bytes are found, dropped and fetched again in pieces of this size."""

SOURCES_WITHOUT_DIGEST = 2
"""How many sources must hold the same bytes as this node if the digest of a file is not known."""

OnWrong = Callable[[str], None]
"""Called with the name of a file as soon as it is known that wrong bytes of it are here, before they are replaced."""

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class HubBudget:
    """How many bytes the checks of one request may still read from the hub only to check, because somebody pays for the
    line. The comparison after a wrong digest is not limited."""

    left_bytes: int


class _NoSourceError(FetchError):
    """No source has some bytes."""


@dataclass(eq=False)
class _Compared:
    """The digests of one pass over a file. as_here: with the bytes that are here. as_sent: with the source's own.
    other: the pieces that differ, with the digest of the source's bytes."""

    as_here: str
    as_sent: str
    other: list[tuple[Span, bytes]] = field(default_factory=list)


class FileCheck:
    """Checks one file of a directory. sources: peers first; the hub last."""

    def __init__(
        self, writer: ModelWriter, name: str, sources: Sequence[UsedSource], context: Context, budget: HubBudget
    ) -> None:
        self._writer = writer
        self._name = name
        self._file = writer.manifest.files[name]
        self._sources = sources
        self._context = context
        self._budget = budget
        self._here: Spans = tuple(self._file.present)

    def run(self, on_wrong: OnWrong) -> str:
        """Returns RIGHT, UNKNOWN or REPAIRED. Raises FetchError if no source has a file with the right digest; then the
        bytes here are dropped, unless there was no source to compare with."""
        if not self._file.sha256:
            return self._compare_copies()
        try:
            if self._digest() == self._file.sha256:
                self._writer.note_verified(self._name, self._here)
                return RIGHT
        except _NoSourceError:
            return UNKNOWN
        return self._find_wrong(on_wrong)

    def _digest(self) -> str:
        """The digest of the bytes here and those of the sources between them."""
        sha = hashlib.sha256()
        for span, is_here in _in_order(self._here, self._file.size):
            for piece in cut((span,), CHUNK_BYTES):
                sha.update(self._own(piece) if is_here else self._read_from_any(piece))
                self._context.go_on()
        return sha.hexdigest()

    def _compare_copies(self) -> str:
        """Without a digest, bytes count as right if they are those of two sources: one of them may be where they came
        from. If they differ, nobody knows which are right."""
        for piece in cut(self._here, PIECE_BYTES):
            mine, num_equal = self._own(piece), 0
            for source in reversed(self._sources):
                with contextlib.suppress(_NoSourceError, NoRangesError):
                    if self._read(source, piece) != mine:
                        _log.warning("%s has other bytes at %s than here", self._name, source.peer or "the hub")
                        return UNKNOWN
                    num_equal += 1
                if num_equal == SOURCES_WITHOUT_DIGEST:
                    break
            else:
                return UNKNOWN
            self._context.go_on()
        self._writer.note_verified(self._name, self._here)
        return RIGHT

    def _find_wrong(self, on_wrong: OnWrong) -> str:
        """Compares with one whole source after the other: the hub first, then peers."""
        num_read = 0
        for source in reversed(self._sources):
            try:
                found = self._compare(source)
            except (_NoSourceError, NoRangesError):
                continue
            num_read += 1
            if found.as_here == self._file.sha256:  # what another peer has was wrong
                self._writer.note_verified(self._name, self._here)
                return RIGHT
            if found.as_sent == self._file.sha256:
                self._replace(found.other, source, on_wrong)
                return REPAIRED
        on_wrong(self._name)
        if not num_read:
            raise FetchError(
                f"{self._name} does not match its sha256, and no second source tells which of its bytes are wrong",
                remedy="delete the model at each peer and fetch it again, or connect a peer that has the whole file",
            )
        self._writer.drop(self._name, ((0, self._file.size),))
        raise FetchError(
            f"{self._name} does not match its sha256 at any source",
            remedy="try again later; if that does not help, the file at the source is corrupt",
            is_final=True,
        )

    def _compare(self, source: UsedSource) -> _Compared:
        here, sent = hashlib.sha256(), hashlib.sha256()
        found = _Compared("", "")
        for piece in cut(((0, self._file.size),), PIECE_BYTES):
            content = self._read(source, piece)
            sent.update(content)
            mine = bytearray(content)
            for start, stop in common((piece,), self._here):
                mine[start - piece[0] : stop - piece[0]] = self._own((start, stop))
            here.update(mine)
            if mine != content:
                found.other.append((piece, hashlib.sha256(content).digest()))
            self._context.go_on()
        found.as_here, found.as_sent = here.hexdigest(), sent.hexdigest()
        return found

    def _replace(self, wrong: Sequence[tuple[Span, bytes]], source: UsedSource, on_wrong: OnWrong) -> None:
        """Drops the wrong pieces, says so, and takes them from a source that has the right file."""
        lost = common(merged(piece for piece, _ in wrong), self._here)
        self._writer.drop(self._name, lost)
        on_wrong(self._name)
        for piece, digest in wrong:
            content = self._read(source, piece)
            if hashlib.sha256(content).digest() != digest:
                raise FetchError(f"{self._name} changed at its source while it was read")
            for start, stop in common((piece,), self._here):
                self._writer.write(self._name, start, memoryview(content)[start - piece[0] : stop - piece[0]])
        self._writer.sync()
        self._writer.note_verified(self._name, self._here)

    def _own(self, span: Span) -> bytes:
        with on_disk(self._writer.model_dir / self._name).open("rb") as stream:
            stream.seek(span[0])
            content = stream.read(span[1] - span[0])
        if len(content) != span[1] - span[0]:
            raise FetchError(f"{self._name} has become shorter")
        return content

    def _read_from_any(self, span: Span) -> bytes:
        for source in self._sources:
            if not source.peer:
                self._budget.left_bytes -= span[1] - span[0]
                if self._budget.left_bytes < 0:
                    continue
            with contextlib.suppress(_NoSourceError, NoRangesError):
                return self._read(source, span)
        raise _NoSourceError(f"no source has the bytes {span} of {self._name}")

    def _read(self, source: UsedSource, span: Span) -> bytes:
        """Raises _NoSourceError if the source does not have these bytes, or does not answer."""
        content = bytearray()

        def keep(data: memoryview) -> None:
            content.extend(data)

        try:
            read_persistently(source, self._name, span, keep, self._context, tries=TRIES_BEFORE_OTHERS)
        except (CancelledRequestError, NoRangesError):
            raise
        except MeshError as exc:
            raise _NoSourceError(str(exc)) from exc
        return bytes(content)


def _in_order(here: Spans, size: int) -> list[tuple[Span, bool]]:
    """All bytes of a file in their order, as (span, whether it is here)."""
    missing = minus(((0, size),), here)
    return sorted([*((span, True) for span in here), *((span, False) for span in missing)])
