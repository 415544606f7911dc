"""What stages have written to disk is used after a restart, gives the same answers, and is never needed for one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from exo_mesh.domain.frame import ListDisk, ReadAhead, StoreKv
from exo_mesh.engine.contract import SavedSequence
from exo_mesh.rings.prefix_disk.folder import FileLimits, StageFolder, stored_files
from exo_mesh.rings.runner import disk_store
from exo_mesh.rings.runner.prefix import disk_index
from exo_mesh.rings.runner.scheduling.sequence import Work
from tests.rings.runner.prefix.disk_ring import DiskRing, until
from tests.rings.runner.prefix.test_prefix_ring import answer, counts
from tests.rings.runner.test_stage_and_driver import expected, ids

PROMPT = [3 + (7 * i) % 40 for i in range(400)]
MakeRing = Callable[..., DiskRing]


@pytest.fixture
def make_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRing]:
    """Makes a ring whose disks are the same each time, and closes the one before."""
    monkeypatch.setattr(disk_index, "SETTLED_S", 0.0)
    monkeypatch.setattr(disk_store, "PART_BYTES", 1)
    made: list[DiskRing] = []

    def make(*arguments: int, **changes: object) -> DiskRing:
        for ring in made:
            ring.close()
        made.append(DiskRing(tmp_path, *arguments, **changes))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for ring in made:
        ring.close()


def files(root: Path) -> list[Path]:
    """What stages have written, and what they have begun to write."""
    return [*root.rglob("*.kv"), *root.rglob("*.new")]


@pytest.mark.parametrize("cuts_back", [True, False])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("secret", [None, bytes(range(32))])
async def test_a_prompt_that_was_served_once_is_read_after_a_restart(
    make_ring: MakeRing, cuts_back: bool, num_stages: int, secret: bytes | None
) -> None:
    ring = make_ring(num_stages, cuts_back=cuts_back, secret=secret)
    cold = await answer(ring, "a", PROMPT)
    assert ring.write_all() >= 1
    again = make_ring(num_stages, cuts_back=cuts_back, secret=secret)
    caller = again.submit("b", PROMPT, 8)
    again.run()
    events = await caller.collect()
    assert ids(events) == cold == expected(PROMPT, 8, num_stages)
    assert events[0].cached == 399, "all of the prompt but its last token"
    assert counts(again) == [8] * num_stages
    assert again.disk.hits == 1 and not again.disk.misses
    again.check()


@pytest.mark.parametrize(("cut", "cached"), [(1, 384), (15, 384), (16, 320)])
async def test_a_shorter_prompt_begins_with_the_whole_blocks_of_a_longer_one(
    make_ring: MakeRing, cut: int, cached: int
) -> None:
    ring = make_ring()
    await answer(ring, "a", PROMPT)
    ring.write_all()
    again = make_ring()
    assert await answer(again, "b", PROMPT[:-cut]) == expected(PROMPT[:-cut], 8, 2)
    assert counts(again) == [len(PROMPT) - cut - 1 - cached + 8] * 2


async def test_the_next_turn_after_a_restart_begins_with_the_last_one(make_ring: MakeRing) -> None:
    ring = make_ring()
    talk = [*PROMPT, *await answer(ring, "a", PROMPT), 5, 6, 7]
    ring.write_all()
    again = make_ring()
    assert await answer(again, "b", talk) == expected(talk, 8, 2)
    assert counts(again) == [8 + 3] * 2, "what the user has added, and the new answer"


async def test_a_longer_conversation_replaces_its_file(make_ring: MakeRing, tmp_path: Path) -> None:
    ring, talk = make_ring(), list(PROMPT)
    for turn in range(4):
        talk += [*await answer(ring, f"t{turn}", talk), *[turn + 3] * 80]
        assert ring.write_all() == 1
    assert len(list(stored_files(tmp_path))) == 2, "one on each stage"
    assert [store.writes for store in ring.stores] == [4, 4]
    await answer(ring, "again", talk[:410], 2)
    assert ring.write_all() == 1 and ring.stores[0].writes == 4, "the file has nearly all of it"


async def test_what_memory_gives_up_is_written_first(make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_index, "SETTLED_S", 1e9)
    ring = make_ring(max_tokens=900)
    prompts = [[start + 3, *PROMPT] for start in range(4)]
    for number, prompt in enumerate(prompts):
        await answer(ring, f"a{number}", prompt)
        ring.end_writes()
    assert ring.cache.evictions >= 1 and len(ring.disk._files) >= 1
    counts(ring)
    assert await answer(ring, "again", prompts[0]) == expected(prompts[0], 8, 2)
    assert ring.disk.hits == 1 and max(counts(ring)) < 100
    ring.check()


@pytest.mark.parametrize("spoil", ["gone", "cut", "changed", "foreign"])
@pytest.mark.parametrize("on_stage", [0, 1])
async def test_a_file_that_one_stage_cannot_read_is_a_miss(
    make_ring: MakeRing, tmp_path: Path, spoil: str, on_stage: int
) -> None:
    ring = make_ring()
    cold = await answer(ring, "a", PROMPT)
    ring.write_all()
    again = make_ring()
    again.driver.pump()
    again.run()  # the files are listed
    (file,) = (tmp_path / f"stage-{on_stage}").glob("*.kv")
    data = bytearray(file.read_bytes())
    if spoil == "gone":
        file.unlink()
    elif spoil == "cut":
        file.write_bytes(data[:-100])
    elif spoil == "changed":
        data[-100] ^= 0xFF
        file.write_bytes(data)
    else:
        (other,) = (tmp_path / f"stage-{1 - on_stage}").glob("*.kv")
        file.write_bytes(other.read_bytes())
    assert await answer(again, "b", PROMPT) == cold
    assert again.disk.misses == 1 and again.cache.is_on
    assert not file.exists()
    assert await answer(again, "c", PROMPT) == cold
    assert again.disk.misses == 1 and again.cache.hits == 2
    again.check()
    assert again.write_all() == 1, "it is written again"


async def test_an_engine_that_refuses_a_file_computes_the_prompt(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ring = make_ring()
    await answer(ring, "a", PROMPT)
    ring.write_all()
    again = make_ring()

    def refuse(*_: object) -> None:
        raise ValueError("these are not my tensors")

    monkeypatch.setattr(again.engines[0], "restore", refuse)
    assert await answer(again, "b", PROMPT) == expected(PROMPT, 8, 2)
    assert not list((tmp_path / "stage-0").glob("*.kv"))
    again.check()


async def test_a_stage_without_a_disk_switches_the_disks_of_the_ring_off(make_ring: MakeRing, tmp_path: Path) -> None:
    ring = make_ring(has_disk=(False, True))
    assert await answer(ring, "a", PROMPT) == expected(PROMPT, 8, 2)
    assert ring.write_all() == 0 and not ring.disk.is_on
    assert not list(stored_files(tmp_path))


async def test_a_folder_that_another_process_gives_back_is_used_a_little_later(
    make_ring: MakeRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_index, "LIST_AGAIN_S", 0.02)
    dying = StageFolder(tmp_path, "stage-0", "stage 0", FileLimits(10**9, 1))
    assert dying.open()
    ring = make_ring()
    cold = await answer(ring, "a", PROMPT)
    assert not ring.disk.is_on and "another process" in ring.stores[0].problem
    dying.close()

    def asks() -> bool:
        ring.driver.pump()
        ring.run()
        return ring.disk.is_on

    until(asks)
    assert ring.write_all() == 1 and not ring.stores[0].problem
    again = make_ring()
    assert await answer(again, "b", PROMPT) == cold and again.disk.hits == 1


async def test_stages_without_a_disk_are_asked_at_most_once_in_a_while(make_ring: MakeRing) -> None:
    ring = make_ring(has_disk=(True, False))
    asked = 0
    for number in range(3):
        ring.submit(f"a{number}", PROMPT, 8)
        while ring.sent:
            asked += sum(isinstance(op, ListDisk) for op in ring.sent[0].ops)
            ring.lap()
    assert asked == 1


async def test_a_request_that_stores_nothing_leaves_nothing_on_disk(make_ring: MakeRing, tmp_path: Path) -> None:
    ring = make_ring(max_tokens=900)
    for number in range(4):
        await answer(ring, f"a{number}", [number + 3, *PROMPT], is_kept=False)
    assert ring.write_all() == 0 and not files(tmp_path)


async def test_only_requests_of_one_scope_read_a_file(make_ring: MakeRing) -> None:
    ring = make_ring()
    await answer(ring, "a", PROMPT, cache_scope=b"mine")
    ring.write_all()
    again = make_ring()
    await answer(again, "b", PROMPT)
    await answer(again, "c", PROMPT, cache_scope=b"theirs")
    assert again.disk.hits == 0
    await answer(again, "d", PROMPT, cache_scope=b"mine")
    assert again.disk.hits == 1


async def test_a_full_disk_is_said_and_costs_no_answer(
    make_ring: MakeRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ring = make_ring()
    ring.free = 0
    for number in range(3):
        prompt = [number + 3, *PROMPT]
        assert await answer(ring, f"a{number}", prompt) == expected(prompt, 8, 2)
        ring.write_all()
    assert "No space left" in ring.stores[0].problem and ring.stores[0].errors == 1
    until(lambda: all(store.problem for store in ring.stores))  # the driver has the answer of the first that fails
    assert sum("No space left" in record.getMessage() for record in caplog.records) == 2, "each stage says it once"
    assert not files(tmp_path)
    ring.free = 10**15
    monkeypatch.setattr(ring.disk, "_paused_until", 0.0)
    for store in ring.stores:
        store._paused_until = 0.0
    assert ring.write_all() == 3 and not ring.stores[0].problem
    ring.check()


async def test_requests_that_need_one_file_at_once_read_it_once(make_ring: MakeRing) -> None:
    ring = make_ring()
    await answer(ring, "a", PROMPT)
    ring.write_all()
    again = make_ring()
    prompts = [[*PROMPT, *[number + 3] * 70] for number in range(5)]
    callers = [again.submit(f"r{number}", prompt, 6) for number, prompt in enumerate(prompts)]
    again.run()
    for prompt, caller in zip(prompts, callers, strict=True):
        assert ids(await caller.collect()) == expected(prompt, 6, 2)
    assert again.stores[0].reads == 1
    again.check()


async def test_a_stream_goes_on_while_stages_read(make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make_ring()
    await answer(ring, "a", PROMPT)
    ring.write_all()
    again = make_ring()
    stream = again.submit("stream", [9] * 30, 40)
    for _ in range(6):
        again.lap()
    held, late = [], []
    for store in again.stores:  # the disks are slow
        held.append(store._reads.put_nowait)
        monkeypatch.setattr(store._reads, "put_nowait", late.append)
    reader = again.submit("reader", PROMPT, 4)
    for _ in range(12):
        again.lap()
    assert again.disk.is_waiting and not reader.ended
    monkeypatch.undo()
    for put, item in zip(held, late, strict=True):
        put(item)
    until(lambda: all(store._has_news for store in again.stores))
    again.run()
    assert ids(await reader.collect()) == expected(PROMPT, 4, 2)
    assert ids(await stream.collect()) == expected([9] * 30, 40, 2)
    assert again.disk.hits == 1
    again.check()


@pytest.mark.parametrize("moment", range(0, 8))
async def test_a_cancel_at_any_moment_of_a_read_leaves_nothing(make_ring: MakeRing, moment: int) -> None:
    ring = make_ring()
    await answer(ring, "a", PROMPT)
    ring.write_all()
    again = make_ring()
    other = again.submit("other", [9] * 30, 12)
    gone = again.submit("gone", PROMPT, 8)
    for _ in range(moment):
        if again.sent:
            again.lap()
    again.driver.cancel("gone", gone.mailbox)
    again.run()
    assert ids(await other.collect()) == expected([9] * 30, 12, 2)
    assert not again.disk.is_waiting and not again.disk._loading
    again.check()


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("laps", [1, 2, 3, 5])
async def test_a_recovered_ring_lists_its_files_again(make_ring: MakeRing, lost: int, laps: int) -> None:
    ring = make_ring()
    await answer(ring, "a", PROMPT)
    ring.write_all()
    again = make_ring()
    first = again.submit("b", PROMPT, 8)
    for _ in range(laps):
        again.lap()
    again.replace_stage(lost)
    assert any(isinstance(op, ListDisk) for frame in again.sent for op in frame.ops)
    again.run()
    assert ids(await first.collect()) == expected(PROMPT, 8, 2)
    again.cache._drop_all()
    assert await answer(again, "c", PROMPT) == expected(PROMPT, 8, 2)
    assert again.disk.is_on and again.disk.hits >= 1
    again.check()


async def test_a_busy_ring_copies_one_sequence_out_in_many_laps(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_index, "BUSY_LAPS", 12)
    ring = make_ring()
    for number in range(3):
        await answer(ring, f"a{number}", [number + 3, *PROMPT])
    stream = ring.submit("stream", [9] * 30, 80)
    steps: list[int] = []
    while ring.sent:
        ring.driver.look()
        steps += [ring.sent[0].step for op in ring.sent[0].ops if isinstance(op, StoreKv)]
        ring.lap()
        wanted = [len(steps)] * 2
        if all(store.copied is None for store in ring.stores):
            until(lambda wanted=wanted: [store.writes for store in ring.stores] == wanted)  # type: ignore[misc]
    assert len(await stream.collect()) == 80
    assert len(steps) == 3 and min(late - soon for soon, late in pairwise(steps)) >= 2 * 12 - 1


async def test_a_stream_waits_for_one_part_of_a_sequence_at_a_time(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_index, "BUSY_LAPS", 12)
    ring = make_ring()
    cold = await answer(ring, "a", PROMPT)
    stream = ring.submit("stream", [9] * 30, 60)
    parts: list[int] = []
    while ring.sent:
        ring.driver.look()
        before = ring.num_saved()[0]
        ring.lap()
        parts.append(ring.num_saved()[0] - before)
    assert ids(await stream.collect()) == expected([9] * 30, 60, 2)
    assert sum(parts) == 5 and max(parts) == 1, "407 positions in parts of 100"
    ring.end_writes()
    again = make_ring()
    assert await answer(again, "b", PROMPT) == cold
    assert again.disk.hits == 1 and not again.disk.misses


@pytest.mark.parametrize("laps", [1, 2, 3])
async def test_a_sequence_that_ends_while_it_is_copied_out_is_written_whole(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch, laps: int
) -> None:
    monkeypatch.setattr(disk_index, "BUSY_LAPS", 0)
    ring = make_ring()
    cold = await answer(ring, "a", PROMPT)
    ring.submit("stream", [9] * 30, 60)
    while not any(saved >= laps for saved in ring.num_saved()):
        ring.driver.look()
        ring.lap()
    assert ring.num_saved()[0] < 5
    for stage in ring.stages:
        stage.forget(list(stage._engine.sequences()))
    assert ring.num_saved() == [5, 5]
    until(lambda: [store.writes for store in ring.stores] == [1, 1])
    again = make_ring()
    assert await answer(again, "b", PROMPT) == cold
    assert again.disk.hits == 1 and not again.disk.misses


async def test_an_engine_that_breaks_while_a_sequence_is_copied_out_costs_no_answer(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = make_ring()
    cold = await answer(ring, "a", PROMPT)

    def save_parts(sequence: int) -> Iterator[SavedSequence]:
        yield SavedSequence(len(PROMPT), {})
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ring.engines[0], "save_parts", save_parts)
    ring.driver.look()
    ring.run()
    until(lambda: ring.stores[1].writes == 1)
    assert await answer(ring, "b", PROMPT) == cold
    assert ring.stores[0].errors == 1 and "out of memory" in caplog.text
    assert not list((tmp_path / "stage-0").glob("*.kv")) and ring.stores[0].copied is None
    ring.check()


async def test_an_operation_beside_running_streams_does_not_end_the_copying(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_index, "BUSY_LAPS", 0)
    ring = make_ring()
    await answer(ring, "a", PROMPT)
    stream = ring.submit("stream", [9] * 30, 60)
    while not ring.num_saved()[0]:
        ring.driver.look()
        ring.lap()
    ring.driver._ops.append(ListDisk())
    ring.driver._start(Work((), ()))
    parts = []
    while ring.num_saved()[0] < 5:
        before = ring.num_saved()[0]
        ring.lap()
        parts.append(ring.num_saved()[0] - before)
    assert max(parts) == 1
    ring.run()
    assert ids(await stream.collect()) == expected([9] * 30, 60, 2)


async def test_a_short_prompt_is_neither_written_nor_looked_for(make_ring: MakeRing, tmp_path: Path) -> None:
    ring = make_ring()
    await answer(ring, "a", PROMPT[:200])
    assert ring.write_all() == 0 and not files(tmp_path)
    assert not any(isinstance(op, ReadAhead) for op in ring.driver._ops)


@pytest.mark.parametrize("count", [6, pytest.param(300, marks=pytest.mark.slow)])
async def test_every_answer_is_the_same_in_random_schedules_with_restarts(make_ring: MakeRing, count: int) -> None:
    hits = 0
    for seed in range(count):
        rng = random.Random(seed)
        cuts_back, stages = rng.random() < 0.7, rng.choice([1, 2, 3])
        known = [list(PROMPT)]
        for start in range(3):
            ring = make_ring(stages, cuts_back=cuts_back, max_tokens=rng.choice([900, 5000]), prefill_chunk=64)
            callers = []
            for number in range(4):
                base = rng.choice(known)
                cut = rng.choice([len(base), rng.randrange(1, len(base))])
                prompt = base[:cut] + [rng.randrange(3, 40) for _ in range(rng.choice([1, 30, 90]))]
                known.append(prompt)
                callers.append((prompt, ring.submit(f"s{start}r{number}", prompt, 4)))
                for _ in range(rng.randrange(20)):
                    if ring.sent:
                        ring.lap()
                if rng.random() < 0.3:
                    ring.driver.look()
            if rng.random() < 0.3 and cuts_back:
                ring.replace_stage(rng.randrange(stages))
            ring.run()
            for prompt, caller in callers:
                assert ids(await caller.collect()) == expected(prompt, 4, stages), (seed, start)
            ring.write_all()
            for file in stored_files(ring.stores[0]._folder.root):
                if rng.random() < 0.15:
                    file.path.write_bytes(file.path.read_bytes()[: rng.randrange(file.num_bytes)])
            hits += ring.disk.hits
            ring.check()
        for file in stored_files(ring.stores[0]._folder.root):
            file.remove()
    assert hits >= count / 2
    assert disk_store.MOST_WRITES == 1
