"""Parts of a file are compared with the digest of the whole file, with the help of those who have the rest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from exo_mesh.domain.spans import Digests, Span, Spans, common, covers, cut_at, minus
from exo_mesh.errors import FetchError
from exo_mesh.models.fetcher import verifying
from exo_mesh.models.fetcher.download import Context, UsedSource
from exo_mesh.models.fetcher.duty import DutyCycle
from exo_mesh.models.fetcher.source import Sink
from exo_mesh.models.fetcher.verifying import REPAIRED, RIGHT, UNKNOWN, FileCheck, HubBudget
from exo_mesh.models.fetcher.wire import Word
from exo_mesh.models.fetcher.writing import Writers, make_part, new_manifest
from exo_mesh.models.file_server.listing import FileInfo, Listing
from exo_mesh.weights.fetched import part_of, read_manifest, write_manifest

SIZE = 50_021
CONTENT = bytes(range(251)) * (SIZE // 251 + 1)
CONTENT = CONTENT[:SIZE]
DIGEST = hashlib.sha256(CONTENT).hexdigest()
FILE = "model.safetensors"
HERE: Spans = ((0, 900), (10_000, 30_500))


@dataclass
class Holder:
    """A peer, or the hub (""), that has some bytes. wrong: positions at which it sends another byte."""

    peer: str
    spans: Spans = ((0, SIZE),)
    wrong: Sequence[int] = ()
    pieces: Digests = ()
    reads: list[Span] = field(default_factory=list)

    def listing(self) -> Listing:
        return Listing("", "", {FILE: FileInfo(SIZE, DIGEST, pieces=self.pieces)})

    def read(self, file: str, start: int, stop: int, sink: Sink) -> None:
        """Sends what it has of a range up to the first gap, as the file server of a peer does."""
        self.reads.append((start, stop))
        there = common(((start, stop),), self.spans)
        if there and there[0][0] == start:
            sink(memoryview(altered(CONTENT, self.wrong)[start : there[0][1]]))
        if not covers(self.spans, ((start, stop),)):
            raise FetchError(f"{self.peer} does not have them")

    def close(self) -> None: ...


def altered(content: bytes, positions: Sequence[int]) -> bytes:
    found = bytearray(content)
    for position in positions:
        found[position] ^= 0x40
    return bytes(found)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "PIECE_BYTES", 1000)
    monkeypatch.setattr(verifying, "CHUNK_BYTES", 4000)


@dataclass
class Checked:
    outcome: str
    here: bytes
    named: list[str]
    verified: Spans
    present: Spans
    pieces: Digests


def check(
    directory: Path,
    executor: ThreadPoolExecutor,
    sources: Sequence[Holder],
    wrong: Sequence[int] = (),
    budget: int = 0,
    digest: str = DIGEST,
    word: Word = "",
    edges: Sequence[int] = (),
) -> Checked:
    """Checks a directory that has HERE, with other bytes at `wrong`."""
    directory.mkdir()
    make_part(part_of(directory, FILE), SIZE)
    manifest = new_manifest("m", "", "", {FILE: (SIZE, digest)})
    manifest.files[FILE].present = list(HERE)
    write_manifest(directory, manifest)
    with part_of(directory, FILE).open("r+b") as stream:
        for start, stop in HERE:
            stream.seek(start)
            stream.write(altered(CONTENT, wrong)[start:stop])
    named: list[str] = []
    used = [UsedSource(one.peer, lambda one=one: one) for one in sources]  # type: ignore[misc]
    with Writers().opened(directory) as writer:
        context = Context(executor, DutyCycle())
        try:
            outcome = FileCheck(writer, FILE, used, context, HubBudget(budget), word=word, edges=edges).run(
                named.append
            )
        except FetchError as exc:
            outcome = str(exc)
    after = read_manifest(directory)
    assert after is not None
    file = after.files[FILE]
    here = part_of(directory, FILE).read_bytes()
    return Checked(outcome, here, named, tuple(file.verified), tuple(file.present), file.pieces)


REST = minus(((0, SIZE),), HERE)


def test_what_is_right_is_noted_with_the_peers_bytes_between(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    first, second, hub = Holder("a", REST[:1]), Holder("b", REST[1:]), Holder("")
    found = check(tmp_path / "m", executor, [first, second, hub])
    assert (found.outcome, found.named, found.verified) == (RIGHT, [], HERE)
    assert not hub.reads, "each byte comes from the hub once"


@pytest.mark.parametrize("position", [0, 899, 10_000, 17_123, 29_999, 30_499])
def test_a_wrong_byte_here_is_said_and_replaced(tmp_path: Path, executor: ThreadPoolExecutor, position: int) -> None:
    found = check(tmp_path / "m", executor, [Holder("a", REST), Holder("")], [position])
    assert (found.outcome, found.named, found.verified, found.present) == (REPAIRED, [FILE], HERE, HERE)
    assert all(found.here[start:stop] == CONTENT[start:stop] for start, stop in HERE)


def test_a_wrong_byte_of_another_peer_is_not_held_against_this_one(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    found = check(tmp_path / "m", executor, [Holder("a", REST, wrong=(5000,)), Holder("")])
    assert (found.outcome, found.named, found.verified) == (RIGHT, [], HERE)


def test_where_the_hub_is_wrong_a_peer_with_the_whole_file_is_right(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    found = check(tmp_path / "m", executor, [Holder("a"), Holder("", wrong=(12_000,))], [12_000])
    assert (found.outcome, found.named, found.verified) == (REPAIRED, [FILE], HERE)
    assert all(found.here[start:stop] == CONTENT[start:stop] for start, stop in HERE)


def test_bytes_that_no_source_has_right_are_dropped(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    found = check(tmp_path / "m", executor, [Holder("a", REST), Holder("", wrong=(12_000,))], [12_000])
    assert "does not match its sha256 at any source" in found.outcome
    assert (found.named, found.verified, found.present) == ([FILE], (), ())


@pytest.mark.parametrize(
    ("sources", "budget", "outcome"),
    [
        ([Holder("a", REST[:1])], 0, UNKNOWN),
        ([Holder("a", REST[:1]), Holder("")], 0, UNKNOWN),
        ([Holder("a", REST[:1]), Holder("")], 20_000, RIGHT),
        ([Holder("a", ()), Holder("")], 20_000, UNKNOWN),
    ],
    ids=["no hub", "not from the hub", "from the hub", "too much from the hub"],
)
def test_what_no_peer_has_is_read_from_the_hub_within_limits(
    tmp_path: Path, executor: ThreadPoolExecutor, sources: list[Holder], budget: int, outcome: str
) -> None:
    found = check(tmp_path / "m", executor, sources, budget=budget)
    assert (found.outcome, found.named, found.present) == (outcome, [], HERE)
    assert found.verified == (HERE if outcome == RIGHT else ())


def test_a_gap_that_two_peers_share_is_read_from_both(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    first, second = Holder("a", ((900, 12_345), (30_500, 41_111))), Holder("b", ((12_345, 30_500), (41_111, SIZE)))
    found = check(tmp_path / "m", executor, [first, second])
    assert (found.outcome, found.verified) == (RIGHT, HERE)


def test_sources_that_are_wrong_at_different_places_are_right_together(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    sources = [Holder("a", wrong=(5000, 12_000)), Holder("b", wrong=(25_000, 40_000)), Holder("c", ((0, 9000),))]
    found = check(tmp_path / "m", executor, sources, [12_000])
    assert (found.outcome, found.named, found.verified) == (REPAIRED, [FILE], HERE)
    assert all(found.here[start:stop] == CONTENT[start:stop] for start, stop in HERE)


def test_sources_that_differ_everywhere_are_not_mixed_in_every_way(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    noise = Holder("a", wrong=range(0, SIZE, 500))
    found = check(tmp_path / "m", executor, [noise, Holder("b", wrong=(40,)), Holder("c")], [12_000])
    assert (found.outcome, found.verified) == (REPAIRED, HERE)
    found = check(tmp_path / "n", executor, [noise, Holder("b", wrong=(12_000,))], [12_000])
    assert "at any source" in found.outcome


@pytest.mark.parametrize(
    ("sources", "outcome"),
    [
        ([Holder("a"), Holder("b")], RIGHT),
        ([Holder("a"), Holder("b", wrong=(12_000,))], UNKNOWN),
        ([Holder("a"), Holder("b", ((0, 12_000),))], UNKNOWN),
        ([Holder("a")], UNKNOWN),
    ],
    ids=["two agree", "two differ", "one has only some", "one"],
)
def test_without_a_digest_two_sources_must_have_the_same_bytes(
    tmp_path: Path, executor: ThreadPoolExecutor, sources: list[Holder], outcome: str
) -> None:
    found = check(tmp_path / "m", executor, sources, digest="")
    assert (found.outcome, found.named, found.present) == (outcome, [], HERE)
    assert found.verified == (HERE if outcome == RIGHT else ())


def test_a_wrong_byte_without_a_second_source_is_an_error(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    found = check(tmp_path / "m", executor, [Holder("a", REST)], [20_000])
    assert "no second source tells which of its bytes are wrong" in found.outcome
    assert (found.named, found.verified, found.present) == ([FILE], (), HERE)


def digests(*edges: int, wrong: int | None = None) -> Digests:
    """Of pieces that begin at the edges of what is here, at these, and every 3,000 bytes. wrong: a position whose piece
    has another digest."""
    spans = cut_at(((0, SIZE),), [edge for span in HERE for edge in span] + [*edges, *range(0, SIZE, 3000)])
    return tuple(
        (start, stop, hashlib.sha256(CONTENT[start:stop] + b"!" * (wrong in range(start, stop))).hexdigest())
        for start, stop in spans
    )


def test_a_check_leaves_the_digests_of_pieces_that_begin_where_the_parts_of_peers_begin(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    found = check(tmp_path / "m", executor, [Holder("a", REST)], word="first", edges=[5000, 40_000])
    assert found.outcome == RIGHT and {0, 900, 5000, 10_000, 30_500, 40_000} <= {one[0] for one in found.pieces}
    assert all(hashlib.sha256(CONTENT[start:stop]).hexdigest() == digest for start, stop, digest in found.pieces)
    assert not check(tmp_path / "n", executor, [Holder("a", REST)]).pieces, "an open mesh has no use for them"


def test_on_the_word_of_a_peer_no_byte_is_read(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    peer = Holder("a", REST, pieces=digests(7777))
    found = check(tmp_path / "m", executor, [peer, Holder("")], word="only")
    assert (found.outcome, found.verified, found.pieces, peer.reads) == (RIGHT, HERE, peer.pieces, [])
    found = check(tmp_path / "n", executor, [Holder("b"), peer], [900 - 1, 20_000], word="only")
    assert (found.outcome, found.named, found.verified, found.present) == (REPAIRED, [FILE], HERE, HERE)
    assert all(found.here[start:stop] == CONTENT[start:stop] for start, stop in HERE)


@pytest.mark.parametrize(
    "pieces",
    [digests()[:-8], digests()[6:], digests(wrong=20_000), ((0, SIZE, DIGEST),), ((-5, 10**12, DIGEST),), ()],
    ids=["cut short", "without the first", "wrong", "not those here", "impossible", "none"],
)
def test_a_word_that_is_of_no_use_changes_nothing_and_the_check_is_made_here(
    tmp_path: Path, executor: ThreadPoolExecutor, pieces: Digests
) -> None:
    peer = Holder("a", REST, pieces=pieces)
    found = check(tmp_path / "m", executor, [peer], word="only")
    assert (found.outcome, found.verified, found.present) == (UNKNOWN, (), HERE)
    found = check(tmp_path / "n", executor, [peer], word="first")
    assert (found.outcome, found.verified) == (RIGHT, HERE)
    assert all(found.here[start:stop] == CONTENT[start:stop] for start, stop in HERE)


def test_an_open_mesh_takes_no_peers_word(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    altered_piece = altered(CONTENT, [20_000])
    lie = tuple((a, b, hashlib.sha256(altered_piece[a:b]).hexdigest()) for a, b, _ in digests())
    found = check(tmp_path / "m", executor, [Holder("liar", pieces=lie, wrong=[20_000]), Holder("")], [20_000])
    assert (found.outcome, found.named) == (REPAIRED, [FILE])
    assert all(found.here[start:stop] == CONTENT[start:stop] for start, stop in HERE)


def whole_file(directory: Path) -> Path:
    """A model that was fetched and checked."""
    directory.mkdir()
    make_part(part_of(directory, FILE), SIZE)
    write_manifest(directory, new_manifest("m", "", "", {FILE: (SIZE, DIGEST)}))
    with Writers().opened(directory) as writer:
        writer.write(FILE, 0, memoryview(CONTENT))
        assert writer.finish(FILE, lambda: None)
    return directory / FILE


def checked_again(directory: Path, executor: ThreadPoolExecutor, *sources: Holder) -> str:
    used = [UsedSource(one.peer, lambda one=one: one) for one in sources]  # type: ignore[misc]
    with Writers().opened(directory) as writer:
        assert writer.manifest.files[FILE].is_unverified
        try:
            return FileCheck(writer, FILE, used, Context(executor, DutyCycle()), HubBudget(0)).run(lambda file: None)
        except FetchError as exc:
            return str(exc)


def is_unverified(directory: Path) -> bool:
    manifest = read_manifest(directory)
    assert manifest is not None
    return manifest.files[FILE].is_unverified_in(directory, FILE)


def changed(file: Path, positions: Sequence[int]) -> None:
    before = file.stat()
    with file.open("r+b") as stream:
        stream.write(altered(CONTENT, positions))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # some file systems count in seconds


@pytest.mark.parametrize(("wrong", "outcome"), [((), RIGHT), ((30_000,), REPAIRED)])
def test_a_whole_file_that_another_program_has_changed_is_checked_again(
    tmp_path: Path, executor: ThreadPoolExecutor, wrong: Sequence[int], outcome: str
) -> None:
    file = whole_file(tmp_path / "m")
    assert not is_unverified(tmp_path / "m")
    changed(file, wrong)
    assert is_unverified(tmp_path / "m")
    assert checked_again(tmp_path / "m", executor, *([Holder("a")] if wrong else [])) == outcome
    assert file.read_bytes() == CONTENT
    assert not is_unverified(tmp_path / "m")


def test_wrong_bytes_of_a_whole_file_stay_unverified_where_nobody_has_the_right_ones(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    changed(whole_file(tmp_path / "m"), (30_000,))
    assert "no second source" in checked_again(tmp_path / "m", executor)
    assert is_unverified(tmp_path / "m")


def test_a_file_that_was_replaced_by_one_of_the_same_time_is_another_file(tmp_path: Path) -> None:
    file = whole_file(tmp_path / "m")
    before, other = file.stat(), tmp_path / "other"
    other.write_bytes(altered(CONTENT, (1,)))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    assert is_unverified(tmp_path / "m")


def test_parts_stay_verified_while_their_own_fetcher_adds_others(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    assert check(tmp_path / "m", executor, [Holder("a", REST)]).outcome == RIGHT
    with Writers().opened(tmp_path / "m") as writer:
        writer.write(FILE, 40_000, memoryview(CONTENT[40_000:41_000]))
    manifest = read_manifest(tmp_path / "m")
    assert manifest is not None
    assert not manifest.files[FILE].is_altered_in(tmp_path / "m", FILE)
    changed(part_of(tmp_path / "m", FILE), (10_000,))
    with Writers().opened(tmp_path / "m") as writer:
        assert not writer.manifest.files[FILE].verified
