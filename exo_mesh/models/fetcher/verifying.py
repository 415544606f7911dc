"""Compares files that are here only in part with the digest of the whole file.

The bytes that are here are hashed in their order, and between them those of other sources, of which nothing is kept. If
the digest is wrong, the whole file is read from one source after the other, and at last from all together, until a file
with the right digest is found; what differs from it here is replaced. In a closed mesh, the node that has read all of a
file lists the digests of its pieces, and the others compare their parts with these.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from exo_mesh.domain.spans import Digests, Span, Spans, covers, cut, cut_at, merged, minus
from exo_mesh.errors import CancelledRequestError, FetchError, MeshError
from exo_mesh.models.fetcher.download import (
    CHUNK_BYTES,
    REST_S,
    TRIES_BEFORE_OTHERS,
    Context,
    SourceLostError,
    UsedSource,
    read_persistently,
)
from exo_mesh.models.fetcher.source import NoRangesError, SourceError
from exo_mesh.models.fetcher.wire import Word
from exo_mesh.models.fetcher.writing import ModelWriter
from exo_mesh.weights.safetensors import on_disk

RIGHT, UNKNOWN, REPAIRED = "right", "unknown", "repaired"
"""What a check found: all bytes here belong to a file with the right digest; no source has the rest of the file now;
wrong bytes were here and are replaced."""

PIECE_BYTES = 2**20
"""Wrong bytes are found, dropped and fetched again in pieces of this size."""

SOURCES_WITHOUT_DIGEST = 2
"""How many sources must hold the same bytes as this node if the digest of a file is not known."""

MAX_PIECES = 16_384
"""Most pieces of a file whose digests are kept: 2 MB of text."""

MAX_CANDIDATES = 16
"""Most files of a search that are hashed at once: sources that differ in four pieces are mixed in every way."""

OnWrong = Callable[[str], None]
"""Called with the name of a file as soon as it is known that wrong bytes of it are here, before they are replaced."""

_log = logging.getLogger(__name__)


class HubBudget(msgspec.Struct, eq=False):
    """How many bytes the checks of one request may still read from the hub only to check, because somebody pays for the
    line. The comparison after a wrong digest is not limited."""

    left_bytes: int


class _NoSourceError(FetchError):
    """No source has some bytes."""


_OWN = -1
"""Stands for this node where sources are numbered."""


class _RightPiece(msgspec.Struct, frozen=True):
    """A piece that is other here: the digest of a source's bytes."""

    piece: Span
    digest: bytes
    source: UsedSource


class _Mixture(msgspec.Struct, frozen=True):
    """A file that may be the right one, up to some byte. owners: the sources that have all of it. other: the pieces
    that are other here."""

    sha: hashlib._Hash
    owners: frozenset[int]
    other: tuple[_RightPiece, ...] = ()


class _Found(msgspec.Struct, frozen=True):
    """What a search found. right: the file with the right digest, if any. is_compared: whether there were other bytes
    to compare those here with."""

    right: _Mixture | None
    is_compared: bool


class FileCheck:
    """Checks one file of a directory. sources: peers first; the hub last."""

    def __init__(
        self,
        writer: ModelWriter,
        name: str,
        sources: Sequence[UsedSource],
        context: Context,
        budget: HubBudget,
        *,
        word: Word = "",
        edges: Sequence[int] = (),
    ) -> None:
        """word, edges: see Verify."""
        self._writer = writer
        self._name = name
        self._file = writer.manifest.files[name]
        self._sources = sources
        self._context = context
        self._budget = budget
        self._word = word
        self._edges = edges
        self._here: Spans = tuple(self._file.present)

    def run(self, on_wrong: OnWrong) -> str:
        """Returns RIGHT, UNKNOWN or REPAIRED. Raises FetchError if no source has a file with the right digest; then the
        bytes here are dropped, unless there was no source to compare with."""
        if not self._file.sha256:
            return self._compare_copies()
        for pieces in self._pieces_of_peers():
            if (found := self._compare_pieces(pieces, on_wrong)) != UNKNOWN:
                return found
        if self._word == "only":
            return UNKNOWN
        try:
            digest, pieces = self._digest()
        except _NoSourceError:
            return UNKNOWN
        if digest == self._file.sha256:
            self._writer.note_verified(self._name, self._here, pieces if len(pieces) <= MAX_PIECES else ())
            return RIGHT
        return self._find_wrong(on_wrong)

    def _digest(self) -> tuple[str, Digests]:
        """The digest of the bytes here with the sources' bytes between them, and the digests of their pieces."""
        sha, pieces = hashlib.sha256(), []
        for span, is_here in _in_order(self._here, self._file.size):
            for piece in cut(cut_at((span,), self._edges), CHUNK_BYTES):
                content = self._own(piece) if is_here else self._read_from_any(piece)
                sha.update(content)
                if self._word:
                    pieces.append((*piece, hashlib.sha256(content).hexdigest()))
                self._context.go_on()
        return sha.hexdigest(), tuple(pieces)

    def _pieces_of_peers(self) -> Iterator[Digests]:
        """The digests of pieces that peers have found in a file with the right digest."""
        for source in self._sources:
            if self._word and source.peer:
                with contextlib.suppress(MeshError, SourceError):
                    info = source.listing().files.get(self._name)
                    is_same = info is not None and info.sha256 == self._file.sha256 and info.size == self._file.size
                    if info is not None and is_same and 0 < len(info.pieces) <= MAX_PIECES:
                        yield info.pieces

    def _compare_pieces(self, pieces: Digests, on_wrong: OnWrong) -> str:
        """Compares the bytes here with the digests of pieces, and replaces pieces that differ. UNKNOWN if not all bytes
        here are in pieces, or no source has a piece as its digest says."""
        mine = [one for one in pieces if covers(self._here, (one[:2],)) and 0 < one[1] - one[0] <= CHUNK_BYTES]
        if not covers(merged(one[:2] for one in mine), self._here):
            return UNKNOWN
        wrong = []
        for start, stop, digest in mine:
            if hashlib.sha256(self._own((start, stop))).hexdigest() != digest:
                wrong.append(((start, stop), digest))
            self._context.go_on()
        if wrong:
            on_wrong(self._name)
        for span, digest in wrong:
            content = self._read_as(span, digest)
            if not content:
                return UNKNOWN
            self._writer.write(self._name, span[0], memoryview(content))
        self._writer.sync()
        self._writer.note_verified(self._name, self._here, pieces)
        return REPAIRED if wrong else RIGHT

    def _read_as(self, span: Span, digest: str) -> bytes:
        """Reads a piece from a source that has it with this digest; nothing if none has."""
        for source in self._sources:
            with contextlib.suppress(_NoSourceError):
                content = self._read(source, span)
                if hashlib.sha256(content).hexdigest() == digest:
                    return content
        return b""

    def _compare_copies(self) -> str:
        """Without a digest, bytes count as right if two sources have the same: one source may be where they came from.
        If they differ, nobody knows which are right."""
        for piece in cut(self._here, PIECE_BYTES):
            mine, num_equal = self._own(piece), 0
            for source in reversed(self._sources):
                with contextlib.suppress(_NoSourceError):
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
        """Compares with one source after the other, the hub first, and then with all together."""
        is_compared = False
        for used in dict.fromkeys((*((source,) for source in reversed(self._sources)), tuple(self._sources))):
            try:
                found = self._search(used)
            except _NoSourceError:
                continue
            is_compared |= found.is_compared
            if found.right is not None:
                self._replace(found.right.other, on_wrong)
                if found.right.other:
                    return REPAIRED
                _log.warning("%s: the bytes here are right, but another peer has wrong bytes", self._name)
                return RIGHT
        on_wrong(self._name)
        if not is_compared:
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

    def _search(self, used: Sequence[UsedSource]) -> _Found:
        """Looks for a file with the right digest among the bytes here and the bytes of some sources. Raises
        _NoSourceError if they do not have all bytes."""
        candidates = [_Mixture(hashlib.sha256(), frozenset(range(-1, len(used))))]
        is_compared = True
        for span, is_here in _in_order(self._here, self._file.size):
            for piece in cut((span,), PIECE_BYTES):
                contents = self._contents(piece, used, self._own(piece) if is_here else None)
                is_compared &= not is_here or any(owners - {_OWN} for owners in contents.values())
                candidates = _grown(candidates, piece, contents, used, is_here=is_here)
                self._context.go_on()
        right = next((one for one in candidates if one.sha.hexdigest() == self._file.sha256), None)
        return _Found(right, is_compared)

    def _contents(self, piece: Span, used: Sequence[UsedSource], own: bytes | None) -> dict[bytes, set[int]]:
        """The different bytes of a piece, each with the numbers of the sources that have them; _OWN: this node. The
        bytes here come first. own: the bytes here, None if there are none."""
        contents: dict[bytes, set[int]] = {} if own is None else {own: {_OWN}}
        found = False
        for number, source in enumerate(used):
            with contextlib.suppress(_NoSourceError):
                contents.setdefault(self._read(source, piece), set()).add(number)
                found = True
        if not found:
            try:  # each source may have only some of it
                contents.setdefault(self._read_from(used, piece), set()).update(range(len(used)))
            except _NoSourceError:
                if own is None:
                    raise
        return contents

    def _replace(self, wrong: Sequence[_RightPiece], on_wrong: OnWrong) -> None:
        """Says that some pieces are wrong, and overwrites them with the bytes of sources that have them right. They are
        not dropped before: a stage that waits for its files would fetch them from where they were wrong."""
        if wrong:
            on_wrong(self._name)
        for one in wrong:
            content = self._read(one.source, one.piece)
            if hashlib.sha256(content).digest() != one.digest:
                raise FetchError(f"{self._name} changed at its source while it was read")
            self._writer.write(self._name, one.piece[0], memoryview(content))
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
        """Reads a span from peers, and from the hub within the budget. Raises _NoSourceError."""
        try:
            return self._read_from([source for source in self._sources if source.peer], span)
        except _NoSourceError:
            self._budget.left_bytes -= span[1] - span[0]
            if self._budget.left_bytes < 0:
                raise
            return self._read_from(self._sources, span)

    def _read_from(self, sources: Sequence[UsedSource], span: Span) -> bytes:
        """Reads a span whose parts may be at different sources, each from the first that has it. Raises
        _NoSourceError."""
        content = b""
        while (position := span[0] + len(content)) < span[1]:
            for source in sources:
                if part := self._read_beginning(source, (position, span[1])):
                    content += part
                    break
            else:
                raise _NoSourceError(f"no source has byte {position} of {self._name}")
        return content

    def _read(self, source: UsedSource, span: Span) -> bytes:
        """Raises _NoSourceError if the source does not have all these bytes, or does not answer."""
        content = self._read_beginning(source, span)
        if len(content) != span[1] - span[0]:
            raise _NoSourceError(f"a source does not have all bytes {span} of {self._name}")
        return content

    def _read_beginning(self, source: UsedSource, span: Span) -> bytes:
        """Reads as much of a span as the source has without a gap; nothing if it does not answer."""
        content = bytearray()

        def keep(data: memoryview) -> None:
            content.extend(data)

        if source.rests_until > time.monotonic():
            return b""
        try:
            read_persistently(source, self._name, span, keep, self._context, tries=TRIES_BEFORE_OTHERS)
        except CancelledRequestError:
            raise
        except SourceLostError:
            source.rests_until = time.monotonic() + REST_S
        except (MeshError, NoRangesError):
            pass
        return bytes(content)


def _grown(
    candidates: Sequence[_Mixture],
    piece: Span,
    contents: Mapping[bytes, set[int]],
    used: Sequence[UsedSource],
    *,
    is_here: bool,
) -> list[_Mixture]:
    """Adds a piece to each candidate: every candidate with every content while there are few, else only candidates from
    a single source."""
    owned = list(contents.items())
    if not is_here or len(owned) == 1:
        owned[0][1].add(_OWN)
    if len(owned) == 1:
        owned = [(owned[0][0], set(range(-1, len(used))))]  # who does not have this piece has no other one
    pairs = [(one, content, owners) for one in candidates for content, owners in owned]
    if len(pairs) > MAX_CANDIDATES:
        pairs = [pair for pair in pairs if pair[0].owners & pair[2]]
    grown = []
    for one, content, owners in pairs:
        sha = one.sha.copy()
        sha.update(content)
        other = one.other
        if is_here and _OWN not in owners:
            source = used[min(owners)]
            other = (*other, _RightPiece(piece, hashlib.sha256(content).digest(), source))
        grown.append(_Mixture(sha, one.owners & owners, other))
    return grown


def _in_order(here: Spans, size: int) -> list[tuple[Span, bool]]:
    """All bytes of a file in their order, as (span, whether it is here)."""
    missing = minus(((0, size),), here)
    return sorted([*((span, True) for span in here), *((span, False) for span in missing)])
