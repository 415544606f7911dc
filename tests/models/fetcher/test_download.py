"""Chunks from several sources: the first that has them, and the next from where that one stopped."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from exo_mesh.domain.spans import Pieces
from exo_mesh.errors import FetchError
from exo_mesh.models.fetcher import download
from exo_mesh.models.fetcher.download import CHUNK_BYTES, Context, Download, UsedSource
from exo_mesh.models.fetcher.duty import DutyCycle
from exo_mesh.models.fetcher.source import Sink, SourceError
from exo_mesh.models.fetcher.writing import Writers, make_part, new_manifest
from exo_mesh.models.file_server.listing import Listing
from exo_mesh.weights.fetched import part_of, read_manifest, write_manifest

SIZE = 3 * CHUNK_BYTES + 12345
CONTENT = bytes(range(251)) * (SIZE // 251 + 1)
FILE = "model.safetensors"


@dataclass
class Peer:
    """Sends CONTENT. breaks_after: bytes of each read after which it fails; is_final: for good. wrong: sends zeros."""

    peer: str
    breaks_after: int | None = None
    is_final: bool = False
    wrong: bool = False
    reads: list[tuple[int, int]] = field(default_factory=list)

    def listing(self) -> Listing:
        raise NotImplementedError

    def read(self, file: str, start: int, stop: int, sink: Sink) -> None:
        self.reads.append((start, stop))
        end = stop if self.breaks_after is None else min(stop, start + self.breaks_after)
        for begin in range(start, end, 2**20):
            piece = CONTENT[begin : min(begin + 2**20, end)]
            sink(memoryview(bytes(len(piece)) if self.wrong else piece))
        if end < stop and self.is_final:
            raise FetchError(f"{self.peer} is gone", is_final=True)
        if end < stop:
            raise SourceError(f"{self.peer} broke")

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(download.MAX_AT_ONCE) as pool:
        yield pool


def empty_model(directory: Path, sha256: str = "") -> Path:
    directory.mkdir()
    make_part(part_of(directory, FILE), SIZE)
    write_manifest(directory, new_manifest("m", "", "", {FILE: (SIZE, sha256)}))
    return directory


def fetch(
    directory: Path,
    executor: ThreadPoolExecutor,
    peers: Sequence[Peer],
    spans: Sequence[tuple[int, int]] = ((0, SIZE),),
) -> Context:
    context = Context(executor, DutyCycle())
    sources = tuple(UsedSource(peer.peer, lambda peer=peer: peer) for peer in peers)  # type: ignore[misc]
    pieces: Pieces = {FILE: tuple(spans)}
    with Writers().opened(directory) as writer:
        Download(writer, [(pieces, sources)], context).run()
    return context


def content(directory: Path) -> bytes:
    return (directory / FILE).read_bytes()


def test_a_chunk_goes_on_at_the_next_source_from_where_the_first_stopped(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    directory = empty_model(tmp_path / "m")
    first, second = Peer("first", 5 * 2**20, is_final=True), Peer("second")
    context = fetch(directory, executor, [first, second])
    assert content(directory) == CONTENT[:SIZE]
    assert sum(context.received.values()) == SIZE, "no byte twice"
    assert (5 * 2**20, CHUNK_BYTES) in second.reads and context.received["first"] > 0
    assert sum(start >= CHUNK_BYTES * 3 for start, _ in first.reads) <= 1


def test_a_source_that_sends_a_little_each_time_is_enough(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    directory = empty_model(tmp_path / "m")
    assert fetch(directory, executor, [Peer("only", 3 * 2**20 + 17)]).received == {"only": SIZE}
    assert content(directory) == CONTENT[:SIZE]


def test_when_no_source_has_bytes_the_last_ones_words_are_the_error(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    directory = empty_model(tmp_path / "m")
    with pytest.raises(FetchError, match="second broke"):
        fetch(directory, executor, [Peer("first", 0, is_final=True), Peer("second", 0)])
    manifest = read_manifest(directory)
    assert manifest is not None and not manifest.present_bytes and not (directory / FILE).exists()


@pytest.mark.extended
def test_a_wrong_file_is_fetched_again_from_the_last_source(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    directory = empty_model(tmp_path / "m", hashlib.sha256(CONTENT[:SIZE]).hexdigest())
    liar, honest = Peer("liar", wrong=True), Peer("honest")
    assert fetch(directory, executor, [liar, honest]).received == {"liar": SIZE, "honest": SIZE}
    assert content(directory) == CONTENT[:SIZE]


@pytest.mark.extended
def test_two_requests_for_the_same_bytes_fetch_them_once(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    directory = empty_model(tmp_path / "m")
    peer = Peer("peer")
    writers = Writers()
    contexts = [Context(executor, DutyCycle()) for _ in range(3)]

    def run(context: Context) -> None:
        with writers.opened(directory) as writer:
            Download(writer, [({FILE: ((0, SIZE),)}, (UsedSource("peer", lambda: peer),))], context).run()

    threads = [threading.Thread(target=run, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(context.received["peer"] for context in contexts) == SIZE
    assert content(directory) == CONTENT[:SIZE]


@pytest.mark.extended
def test_two_processes_do_not_write_one_directory(tmp_path: Path) -> None:
    directory = empty_model(tmp_path / "m")
    with Writers().opened(directory):
        other = "from pathlib import Path; from exo_mesh.models.fetcher import writing; writing.LOCK_LIMIT_S = 0.1; "
        other += f"writing.ModelWriter(Path({str(directory)!r}), 0)"
        said = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=False).stderr
        assert "another process is already fetching m into this directory" in said
    with Writers().opened(directory) as writer:
        assert writer.missing(FILE, ((0, SIZE),)) == ((0, SIZE),)


def test_only_the_bytes_asked_for_are_fetched(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    directory = empty_model(tmp_path / "m")
    peer = Peer("peer")
    fetch(directory, executor, [peer], [(100, 200), (5000, 9000)])
    assert sorted(peer.reads) == [(100, 200), (5000, 9000)]
    fetch(directory, executor, [peer], [(50, 6000)])
    assert sorted(peer.reads[2:]) == [(50, 100), (200, 5000)]
    manifest = read_manifest(directory)
    assert manifest is not None and manifest.files[FILE].present == [(50, 9000)]


def test_a_busy_machine_gives_a_quarter_of_a_core() -> None:
    spent, slept = [0.0], list[float]()
    duty = DutyCycle(lambda: spent[0], slept.append)
    duty.rest()
    spent[0] += 0.1
    duty.rest()
    assert not slept
    duty.is_busy = True
    spent[0] += 0.1
    duty.rest()
    assert slept == [pytest.approx(0.3)]
