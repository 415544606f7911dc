"""Requests that share a ring get what each gets alone, through the real driver and real stages in one process.

The grid of real processes, 1 to 32 at once, is in tests/meshes/test_exactness_grid.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.text.tokenizer import TextModel
from exo_mesh.weights.card import read_card
from tests.engines.serving_ways import (
    DETERMINISTIC,
    DUMMY,
    FAST,
    MLX,
    MLX_IN_BLOCKS,
    TORCH,
    TORCH_BF16,
    Bench,
    Way,
    flat_model,
    prompts,
)
from tests.support.serving import ServingRing
from tests.text.text_models import encode_chat

AT_ONCE = (8, pytest.param(32, marks=pytest.mark.extended))
MOST = 32
DEMO = Path(str(resources.files("exo_mesh.weights") / "shipped" / "exo-mesh-demo"))


def in_two(cut: int) -> Any:
    return pytest.param((cut,), id="two stages", marks=pytest.mark.slow)


SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in (FAST, TORCH_BF16)]


@pytest.fixture(
    scope="module",
    params=[DUMMY, DETERMINISTIC, MLX, pytest.param(MLX_IN_BLOCKS, marks=pytest.mark.extended), TORCH, *SLOW],
    ids=lambda way: way.name,
)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    if not found.is_installed:
        pytest.skip(f"the library of {found.engine} is not installed")
    return found


@pytest.fixture(scope="module")
def flat(way: Way, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(way, flat_model(tmp_path_factory.mktemp("flat")), prompts(MOST), 12)
    yield bench
    bench.close()


@pytest.mark.parametrize("cuts", [in_two(2), pytest.param((1, 3), id="three stages")])
@pytest.mark.parametrize("at_once", AT_ONCE)
def test_with_flat_logits_each_gets_what_it_gets_alone(flat: Bench, cuts: tuple[int, ...], at_once: int) -> None:
    ring = ServingRing(flat.stages(cuts), prefill_chunk=24)
    asked = [ring.submit(prompt, flat.tokens) for prompt in flat.prompts[:at_once]]
    ring.run()
    for one in asked:
        assert len(one.answers.tokens) == flat.tokens
        flat.check(one)
    assert not any(ring.leftovers().values()), ring.leftovers()


RANGES = [(first, first + 2 + first % 6) for first in range(3, 3 + 2 * MOST, 2)]
"""What the demo model is asked to count."""


@pytest.fixture(scope="module")
def demo(way: Way) -> Iterator[Bench]:
    if way is DUMMY:
        pytest.skip("the dummy engine makes things up")
    text = TextModel.open(DEMO)
    questions = [
        tuple(encode_chat(text, [{"role": "user", "content": f"Count from {first} to {last}."}]))
        for first, last in RANGES
    ]
    bench = Bench(way, DEMO, questions, 40)
    yield bench
    bench.close()


@pytest.mark.parametrize("cuts", [in_two(4), pytest.param((3, 5), id="three stages")])
@pytest.mark.parametrize("at_once", AT_ONCE)
def test_the_demo_model_counts_right_in_any_company(demo: Bench, cuts: tuple[int, ...], at_once: int) -> None:
    text, stops = TextModel.open(DEMO), frozenset(read_card(DEMO, "demo").eos_ids)
    ring = ServingRing(demo.stages(cuts))
    asked = [ring.submit(prompt, demo.tokens, stop_ids=stops) for prompt in demo.prompts[:at_once]]
    ring.run()
    for one, (first, last) in zip(asked, RANGES[:at_once], strict=True):
        tokens = [event.token_id for event in one.answers.events if event.HasField("token_id")]
        said = b"".join(text.token_bytes(token) for token in tokens).decode()
        assert said == ", ".join(map(str, range(first, last + 1)))
    assert not any(ring.leftovers().values()), ring.leftovers()
