"""Requests come, go, are cancelled, parked, evicted and go on, between any two frames: each gets what it gets alone,
and afterwards nothing is held for any of them, on any stage or in the driver."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.engines.serving_ways import DETERMINISTIC, DUMMY, MLX, MLX_IN_BLOCKS, TORCH, Bench, Way, prompts, write_model
from tests.support.serving import Asked, ServingRing

NUM_PROMPTS = 8
SIZES = (3, 17, 1, 30, 9, 2, 24, 5)
TOKENS = 10
PARK_AT = 3
"""Messages that a reader may be behind here, instead of hundreds."""

CUTS: tuple[tuple[int, ...], ...] = ((), (2,), (), (2,), (1, 3), (1, 2, 3))

WAYS = (DUMMY, DETERMINISTIC, MLX, MLX_IN_BLOCKS, TORCH)
WINDOWS_AND_STATES = (
    replace(MLX, architecture="gemma3_text", dtype="float32"),
    replace(MLX, architecture="qwen3_next"),
    replace(MLX_IN_BLOCKS, architecture="gemma3_text"),
    replace(MLX_IN_BLOCKS, architecture="qwen3_next"),
    replace(TORCH, architecture="gemma3_text"),
    replace(TORCH, architecture="qwen3_next"),
)
"""Models whose layers keep a window, or a state that cannot be cut back. In what order MLX keeps a window that is full
depends on how the prompt was cut into chunks, and so does the last bit of a sum over it."""
HAPPENINGS = ("shared", "copied", "scored", "evicted", "parked", "cancelled", "overloaded", "resumed")

Benches = Callable[[Way], Bench]


@pytest.fixture(scope="module")
def bench_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Benches]:
    made: dict[str, Bench] = {}

    def get(way: Way) -> Bench:
        if not way.is_installed:
            pytest.skip(f"the library of {way.engine} is not installed")
        if way.name not in made:
            model_dir = write_model(way, tmp_path_factory.mktemp(way.name))
            bench = made[way.name] = Bench(way, model_dir, prompts(NUM_PROMPTS, sizes=SIZES), TOKENS)
            for prompt in bench.prompts:  # now, while nothing else is on these stages
                bench.alone(prompt)
        return made[way.name]

    yield get
    for bench in made.values():
        bench.close()


@pytest.fixture(scope="module", autouse=True)
def impatient_mailboxes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exo_mesh.rings.runner.outputs.PARK_AT", PARK_AT)
        yield


@pytest.fixture(autouse=True)
def garbage_is_collected_before() -> None:
    """MLX counts the memory of a process: engines of earlier tests must not be freed during a story."""
    gc.collect()


REFUSED = ("overloaded", "memory_pressure")
"""Nothing of these requests was computed, and their clients may ask again."""


class Story:
    """What happens on one ring, drawn step by step, so that a failure shrinks to the few steps that matter."""

    def __init__(self, bench: Bench, data: st.DataObject) -> None:
        self.bench, self.data = bench, data
        cuts = data.draw(st.sampled_from(CUTS), "cuts")
        times = st.lists(st.floats(1e-6, 1e-2), min_size=len(cuts) + 1, max_size=len(cuts) + 1)
        limits = {
            "prefill_chunk": data.draw(st.sampled_from([40, 16, 7, 3, 1]), "prefill_chunk"),
            "max_tokens": data.draw(st.sampled_from([200, 80, 40, 15]), "pool"),
            "max_running": data.draw(st.sampled_from([8, 8, 4, 2]), "max_running"),
            "max_rows": data.draw(st.sampled_from([8, 8, 3, 1]), "max_rows"),
            "max_waiting": data.draw(st.sampled_from([8, 8, 2]), "max_waiting"),
        }
        engines = bench.stages(cuts)
        self.held = [engine.memory_bytes() for engine in engines]
        self.ring = ServingRing(engines, computing_s=data.draw(st.one_of(st.none(), times), "computing_s"), **limits)
        self.num_parked = 0
        self.slow: list[Asked] = []
        self.cancelled: list[Asked] = []

    def act(self) -> None:
        """One thing: more often a frame moves than anything else."""
        match self.data.draw(st.sampled_from(["step"] * 6 + ["ask"] * 3 + ["cancel", "read", "pressure"])):
            case "step":
                stage = self.data.draw(st.integers(0, len(self.ring.engines) - 1), "stage")
                for _ in range(self.data.draw(st.integers(1, 4), "times")):
                    self.ring.step(stage)
            case "ask":
                self.ask()
            case "cancel" if self.ring.asked:
                asked = self.data.draw(st.sampled_from(list(self.ring.asked.values())), "cancelled")
                if not asked.answers.ended:
                    self.cancelled.append(asked)
                self.ring.cancel(asked)
            case "read" if self.slow:
                self.ring.read(self.data.draw(st.sampled_from(self.slow), "reader"))
            case "pressure":
                self.ring.pressure = self.data.draw(st.sampled_from([0, 0, 1, 2]), "pressure")
        self.read_all_but_slow()

    def ask(self) -> None:
        """Of the same prompt as another one, maybe, whose prefill it may share, and as one that was accepted on an
        earlier ring, maybe."""
        prompt = self.data.draw(st.sampled_from(self.bench.prompts), "prompt")
        tokens = self.data.draw(st.integers(1, self.bench.tokens), "tokens")
        done = self.data.draw(st.sampled_from([0, 0, 0, tokens // 2]), "done before")
        client, priority = self.data.draw(st.sampled_from([("", 0), ("other", 0), ("low", -1)]), "who")
        known = tuple(self.bench.alone(prompt).answers.tokens[:done])
        wish = {
            "share_id": self.data.draw(st.sampled_from(["", "one", "one", "other"]), "share_id"),
            "prompt_logprobs": self.data.draw(st.sampled_from([None, None, None, 2]), "prompt_logprobs"),
        }
        asked = self.ring.submit(
            prompt, tokens, client=client, priority=priority, resume_ids=known, resumed=bool(done), **wish
        )
        if self.data.draw(st.sampled_from([False] * 4 + [True]), "slow reader"):
            self.slow.append(asked)

    def finish(self) -> None:
        """Let all that is left come to its end: slow readers catch up, memory is there again."""
        self.ring.pressure = 0
        while True:
            while self.ring.turn():
                self.read_all_but_slow()
            unread = [asked for asked in self.slow if asked.answers.backlog]
            if not unread:
                return
            for asked in unread:
                self.num_parked += asked.answers.parked
                self.ring.read(asked)

    def read_all_but_slow(self) -> None:
        for asked in self.ring.asked.values():
            if asked not in self.slow:
                self.ring.read(asked)

    def happened(self) -> Counter[str]:
        """How many requests and frames of each kind there were."""
        answers = [asked.answers for asked in self.ring.asked.values()]
        together = [frame for frame in self.ring.frames if len(frame.rows) > 1 and frame.rows[0].num_logits]
        return Counter(
            stories=1,
            requests=len(answers),
            frames=len(self.ring.frames),
            shared=len(together),
            copied=self.ring.driver.beginnings.shared.saved_tokens,
            scored=sum(bool(asked.request.num_scores) for asked in self.ring.asked.values()),
            evicted=self.ring.driver.evictions,
            parked=self.num_parked,
            cancelled=sum(one.error == "cancelled" for one in answers),
            overloaded=sum(one.error in REFUSED for one in answers),
            resumed=sum(one.first > 0 for one in answers),
        )

    def check(self) -> None:
        for asked in self.ring.asked.values():
            assert asked.answers.ended, f"{asked.request.request_id} has no end"
            if asked in self.cancelled:
                assert asked.answers.error == "cancelled"
            elif asked.answers.error:
                assert asked.answers.error in REFUSED and not asked.answers.events
            else:
                assert len(asked.answers.tokens) == asked.request.max_tokens - len(asked.request.resume_ids)
                scored = [entry.index for message in asked.answers.messages for entry in message.prompt]
                assert scored == list(range(1, asked.request.num_scores + 1)), "each once, and in order"
            self.bench.check(asked)
        assert not any(self.ring.leftovers().values()), self.ring.leftovers()
        assert [engine.memory_bytes() for engine in self.ring.engines] == self.held, "each byte of KV is back"


def tell(bench: Bench, data: st.DataObject) -> Story:
    """One story from its beginning to its end, checked."""
    story = Story(bench, data)
    try:
        for _ in range(data.draw(st.integers(0, 6), "asked at once")):
            story.ask()
        for _ in range(data.draw(st.integers(5, 60), "length")):
            story.act()
        story.finish()
        story.check()
    finally:
        for engine in story.ring.engines:  # shared by all stories: one that fails must not disturb the next
            for sequence in engine.sequences():
                engine.remove(sequence)
    return story


def stories(count: int) -> settings:
    """No database, no deadline."""
    phases = [Phase.explicit, Phase.generate, Phase.shrink]
    return settings(
        max_examples=count, deadline=None, phases=phases, database=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.extended if way is MLX_IN_BLOCKS else ()) for way in WAYS],
    ids=lambda way: way.name,
)
@seed(0)
@stories(6)
@given(data=st.data())
def test_whatever_happens_each_gets_its_text_and_nothing_is_left(
    bench_of: Benches, way: Way, data: st.DataObject
) -> None:
    tell(bench_of(way), data)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("way", [*WAYS, *WINDOWS_AND_STATES], ids=lambda way: way.name)
def test_a_hundred_of_a_thousand_stories(bench_of: Benches, way: Way, part: int) -> None:
    """With what happened in them: a story in which nobody is ever evicted or parked would show little."""
    seen: Counter[str] = Counter()
    bench = bench_of(way)

    @seed(1 + part)
    @stories(100)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        story = tell(bench, data)
        seen.update(story.happened())

    run()
    print(f"\n{way.name}, part {part}: {dict(seen)}")
    rare = {"copied"} if way in WINDOWS_AND_STATES else set()  # only at the end of the prompt, or within the window
    assert min(seen[what] for what in HAPPENINGS if what not in rare) >= 2, seen
