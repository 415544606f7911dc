"""A model that takes images, cut into torch stages, gives the logits of transformers' own whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("PIL")

import torch
from exo_mesh_torch import provider
from exo_mesh_torch.survey import survey

from exo_mesh.domain.frame import Row
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import ImageTaker, StageEngine
from exo_mesh.errors import EngineError, InputError
from tests.support.vision_models import CONFIGS, NUM_LAYERS, TinyVision, tiny_prompt, whole_logits, write_vision_model
from tools.stages import Stages, forward, insert, remove

TOLERANCE = 1e-3
NUM_DECODED = 6


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=CONFIGS)
def prompt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    directory = tmp_path_factory.mktemp(request.param)
    return tiny_prompt(write_vision_model(directory, request.param), request.param)


@pytest.fixture(scope="module")
def stages(prompt: TinyVision) -> Iterator[Stages]:
    made = Stages(provider, prompt.directory, NUM_LAYERS, threads="1")
    yield made
    made.close()


def show(ring: Sequence[StageEngine], sequence: int, prompt: TinyVision) -> None:
    """What the op of an image does at every stage."""
    for picture in prompt.pictures:
        spec = picture.spec
        pixels = Tensor("uint8", (spec.height, spec.width, 3), picture.pixels)
        for index, stage in enumerate(ring):
            assert isinstance(stage, ImageTaker)
            stage.show(sequence, spec, None if index else pixels)


def chunked(ring: Sequence[StageEngine], sequence: int, prompt: TinyVision, chunks: Sequence[int]) -> np.ndarray:
    """Logits of every position: the prompt in chunks, then single tokens."""
    insert(ring, [sequence], 256)
    show(ring, sequence, prompt)
    stops = [*chunks, *range(len(prompt.ids) - NUM_DECODED, len(prompt.ids) + 1)]
    parts = []
    for start, stop in zip([0, *stops], stops, strict=False):
        if start < stop:
            parts.append(forward(ring, [Row(sequence, start, stop - start, stop - start)], prompt.ids[start:stop]))
    remove(ring, [sequence])
    return np.concatenate(parts)


@pytest.mark.parametrize("cuts", [(), (3,), (2, 4)])
def test_stages_give_the_logits_of_the_whole_model(prompt: TinyVision, stages: Stages, cuts: tuple[int, ...]) -> None:
    want = whole_logits(prompt)
    assert np.ptp(want) > 0.1, "the logits are all alike: this proves little"
    between = prompt.pictures[0].spec.stop + 2
    for chunks in ((), (between,), (prompt.pictures[0].spec.start, between)):
        got = chunked(stages.ring(cuts), 1, prompt, chunks)
        np.testing.assert_allclose(got, want, atol=TOLERANCE)


def test_sequences_with_and_without_images_decode_in_one_frame(prompt: TinyVision, stages: Stages) -> None:
    ring = stages.ring((3,))
    want, plain = whole_logits(prompt), tiny_prompt(prompt.directory, prompt.family, seed=1).ids[:5]
    n = len(prompt.ids)
    insert(ring, [1, 2, 3], 256)
    show(ring, 1, prompt)
    forward(ring, [Row(1, 0, n - 3)], prompt.ids[:-3])
    forward(ring, [Row(2, 0, 5)], plain)
    for stage in ring:
        stage.copy(1, 3, n - 3, 256)  # type: ignore[attr-defined]
    alone = forward(ring, [Row(2, 5, 1, 1)], [7])
    for index in range(3):
        ids = [prompt.ids[n - 3 + index], 7, prompt.ids[n - 3 + index]]
        rows = [Row(1, n - 3 + index, 1, 1), Row(2, 5, 1, 1), Row(3, n - 3 + index, 1, 1)]
        got = forward(ring, rows, ids)
        np.testing.assert_allclose(got[[0, 2]], want[[n - 3 + index] * 2], atol=TOLERANCE)
        np.testing.assert_allclose(got[1], alone[0], atol=TOLERANCE)
    remove(ring, [1, 2, 3])


def test_an_image_changes_the_answer(prompt: TinyVision, stages: Stages) -> None:
    other = tiny_prompt(prompt.directory, prompt.family, seed=2)
    swapped = TinyVision(prompt.directory, prompt.family, prompt.ids, other.pictures)
    ring = stages.ring((3,))
    assert np.abs(chunked(ring, 1, prompt, ())[-1] - chunked(ring, 1, swapped, ())[-1]).max() > 10 * TOLERANCE


def test_pixels_that_do_not_fit_the_placeholders_are_refused(prompt: TinyVision, stages: Stages) -> None:
    spec = prompt.pictures[0].spec
    wrong = type(spec)(
        spec.start, spec.num_tokens + 1, spec.rows, spec.columns, spec.height, spec.width, spec.mean, spec.std,
        spec.digest,
    )  # fmt: skip
    first = stages.ring((3,))[0]
    insert([first], [1])
    with pytest.raises(EngineError, match=f"the prompt has {spec.num_tokens + 1} placeholders"):
        first.show(1, wrong, Tensor("uint8", (spec.height, spec.width, 3), prompt.pictures[0].pixels))  # type: ignore[attr-defined]
    remove([first], [1])


def test_a_row_with_a_part_of_a_whole_image_is_a_fault(prompt: TinyVision, stages: Stages) -> None:
    if not prompt.pictures[0].spec.is_whole:
        pytest.skip("the tokens of this family's images do not go together")
    with pytest.raises(RuntimeError, match="only a part of the image"):
        chunked(stages.ring((3,)), 1, prompt, (prompt.pictures[0].spec.start + 1,))
    remove(stages.ring((3,)), [1])


def test_the_vision_tower_counts_on_the_first_stage_only(prompt: TinyVision, stages: Stages) -> None:
    first, second = stages.ring((3,))
    found = survey(prompt.directory, {})
    layers = sum(found.layer_bytes[:3])
    assert 0 <= first.memory_bytes() - found.embed_bytes - layers < 256, "buffers for rotary embeddings"
    assert second.memory_bytes() < first.memory_bytes()


def test_no_stage_begins_between_the_layers_that_need_the_tower(tmp_path: Path) -> None:
    write_vision_model(tmp_path, "qwen3_vl")
    assert survey(tmp_path, {}).legal_cuts == (2, 3, 4, 5)


def test_a_model_without_a_tower_refuses_an_image(tmp_path: Path) -> None:
    from tools.architectures.torch_models import write_random_model

    write_random_model(tmp_path, "llama")
    (stage,) = Stages(provider, tmp_path, 8, threads="1").ring(())
    insert([stage], [1])
    spec = tiny_prompt(tmp_path, "llava").pictures[0].spec
    with pytest.raises(InputError, match="takes no images"):
        stage.show(1, spec, None)  # type: ignore[attr-defined]
    stage.close()


def test_a_broken_tower_stops_only_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_vision_model(tmp_path, "llava")
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 2  # the file has three layers
    (tmp_path / "config.json").write_text(json.dumps(config))
    (stage,) = Stages(provider, tmp_path, NUM_LAYERS, threads="1").ring(())
    assert "its vision tower cannot be loaded" in caplog.text
    insert([stage], [1])
    assert forward([stage], [Row(1, 0, 3, 1)], [5, 6, 7]).shape[0] == 1
    picture = tiny_prompt(tmp_path, "llava").pictures[0]
    with pytest.raises(InputError, match="its vision tower cannot be loaded"):
        stage.show(1, picture.spec, Tensor("uint8", (16, 16, 3), picture.pixels))  # type: ignore[attr-defined]
    stage.close()
