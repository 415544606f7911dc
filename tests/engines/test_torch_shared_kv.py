"""The torch engine's shared parts of KV; test_shared_kv.py has what every engine must show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from exo_mesh_torch import provider

from exo_mesh.engine.contract import MOST_PARTS
from tests.support.shared_streams import PROMPT, Streams, loaded
from tools.architectures.torch_families import NUM_LAYERS
from tools.architectures.torch_models import write_random_model


@pytest.fixture
def streams(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Streams]:
    family = getattr(request, "param", "llama")
    made = Streams([loaded(provider, write_random_model(tmp_path, family), NUM_LAYERS, threads="1")])
    yield made
    for stage in made.stages:
        stage.close()


def test_copies_of_copies_have_few_parts_and_compute_as_alone(streams: Streams) -> None:
    streams.begin(300)
    context = PROMPT[:300]
    for sequence in range(1, MOST_PARTS + 3):
        streams.copy(sequence, sequence + 1, len(context))
        streams.compute((sequence + 1, len(context), PROMPT[:260]))
        context += PROMPT[:260]
    got = streams.compute((sequence + 1, len(context), (5,)), (2, 560, (6,)))
    streams.check_alone(got[0], context, (5,))
    streams.check_alone(got[1], context[:560], (6,))


@pytest.mark.parametrize(
    ("streams", "shares"), [("gemma3_text", False), ("deepseek_v3", False), ("qwen3_next", True)], indirect=["streams"]
)
def test_the_kinds_of_cache_that_share(streams: Streams, shares: bool) -> None:
    streams.tolerance = lambda _: 1e-3
    assert bool(streams.stages[0].capabilities.shares_from) == shares
    streams.begin(600)
    streams.copy(1, 2, 600)
    got = streams.compute((1, 600, (5,)), (2, 600, (6,)))
    streams.remove(2)
    for place, token in enumerate((5, 6)):
        streams.check_alone(got[place], PROMPT[:600], (token,))
