"""A model cut into torch stages gives the very bits of transformers' own model. Families are chosen for what is odd."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from exo_mesh_torch import provider
from exo_mesh_torch.caches import ForeignLayer
from exo_mesh_torch.survey import survey

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import ANY_POSITION, CUT_POSITIONS, LoadRequest
from exo_mesh.errors import ModelError
from tools.architectures.check import check
from tools.architectures.pages import TORCH as PAGE
from tools.architectures.torch_families import FAMILIES, NUM_LAYERS
from tools.architectures.torch_models import TOLERANCE, reference, whole_model_logits, write_random_model
from tools.architectures.trials import computed
from tools.stages import Stages, forward

QUICK = {
    "llama": (2, 5),
    "gemma3_text": (3, 4),  # windows, two kinds of rotary embeddings, norms that count from 1
    "qwen3_moe": (1, 7),  # experts that are stacked on load
    "gpt2": (4,),  # positions that are learned, a tied head, other names
    "lfm2": (1, 2),  # the first two stages have no attention
    "gemma3n_text": (2, 3),  # parallel hidden states, embeddings that every layer uses
}
SLOW = [name for name in FAMILIES if PAGE.states().get(name) == "exact"]
"""Those of which docs/reference/architectures.md says that they are exact."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing by threads, and wait for them on a busy machine."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", QUICK)
def test_a_cut_model_has_the_bits_of_the_whole(tmp_path: Path, family: str) -> None:
    write_random_model(tmp_path, family)
    stages = Stages(provider, tmp_path, NUM_LAYERS, threads="1")
    want = whole_model_logits(tmp_path)
    assert np.ptp(want) > 0.1, "the logits are all alike: this proves little"
    np.testing.assert_array_equal(computed(stages.ring(QUICK[family])), want)
    stages.close()


def test_rows_of_different_lengths_decode_together(tmp_path: Path) -> None:
    """Windows are shorter than the rows, which differ by up to 14 positions."""
    write_random_model(tmp_path, "gpt_oss")
    stages = Stages(provider, tmp_path, NUM_LAYERS, threads="1")
    got, want = computed(stages.ring((3,)), "together"), reference(tmp_path)["together"]
    np.testing.assert_allclose(got, want, atol=TOLERANCE)
    stages.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", SLOW)
def test_every_legal_cut_in_two_and_in_three(family: str) -> None:
    outcome = check("torch", family)
    assert outcome.state == "exact", outcome


def test_values_shared_between_layers_limit_the_cuts(tmp_path: Path) -> None:
    """The last three of eight layers use keys and values of layers 3 and 4."""
    write_random_model(tmp_path, "gemma4_text")
    assert survey(tmp_path, {}).legal_cuts == (1, 2, 3)
    stage = provider.create()
    with pytest.raises(ModelError, match="cannot be cut before layer 6"):
        stage.load(LoadRequest(Shard("m", 6, 8, NUM_LAYERS), tmp_path, 512), lambda done, total: None)


def test_a_model_whose_layers_hand_on_more_runs_in_one_piece(tmp_path: Path) -> None:
    write_random_model(tmp_path, "glm_moe_dsa")
    found = survey(tmp_path, {})
    assert found.legal_cuts == () and "more than one value" in found.reason
    stages = Stages(provider, tmp_path, NUM_LAYERS, threads="1")
    want = whole_model_logits(tmp_path)
    np.testing.assert_allclose(computed(stages.ring(())), want, atol=TOLERANCE)
    stages.close()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("axk2", marks=pytest.mark.extended),
        pytest.param("dots3_note_text", marks=pytest.mark.extended),
        pytest.param("deepseek_v4", marks=pytest.mark.slow),
    ],
)
def test_caches_that_are_transformers_own_business_can_be_cut_too(family: str) -> None:
    """Masks that come from layer 0's cache, cache layers that models define, settings that differ by layer."""
    outcome = check("torch", family, few=True)
    assert outcome.cuts == tuple(range(1, NUM_LAYERS)) and outcome.worst["alone"] == 0.0 and outcome.state == "exact"


def test_a_cut_that_fails_once_there_is_a_past_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if layers elsewhere did not count: AXK2 makes its masks from the cache of layer 0."""
    write_random_model(tmp_path, "axk2")
    monkeypatch.setattr(ForeignLayer, "skip", lambda self, num_tokens: None)
    found = survey(tmp_path, {})
    assert found.legal_cuts == () and "in frame 2: attention_mask of shape" in found.reason
    stage = provider.create()
    with pytest.raises(ModelError, match="transformers' code fails on layers 4 to 7 of 8"):
        stage.load(LoadRequest(Shard("m", 4, 8, NUM_LAYERS), tmp_path, 512), lambda done, total: None)


def test_a_model_whose_code_looks_at_values_is_refused_with_a_sentence(tmp_path: Path) -> None:
    write_random_model(tmp_path, "biogpt")
    with pytest.raises(ModelError, match="the torch engine cannot run BioGptForCausalLM: its code"):
        survey(tmp_path, {})


def test_a_window_that_no_sequence_can_outgrow_is_none(tmp_path: Path) -> None:
    write_random_model(tmp_path, "mistral")
    rollback = {}
    for limit in (16, 512):
        stage = provider.create()
        stage.load(LoadRequest(Shard("m", 0, 8, 8), tmp_path, limit, {"threads": "1"}), lambda done, total: None)
        rollback[limit] = (stage.capabilities.rollback, stage.capabilities.kv)
        stage.close()
    assert rollback == {16: (ANY_POSITION, ("full",)), 512: (CUT_POSITIONS, ("window",))}


def test_drafts_that_are_rejected_row_by_row_leave_no_trace(tmp_path: Path) -> None:
    """Two rows of different lengths; each loses another number of positions, beyond a window."""
    write_random_model(tmp_path, "gemma2")
    ring = Stages(provider, tmp_path, NUM_LAYERS, threads="1").ring((3,))
    ids = np.arange(3, 50, dtype=np.int32)
    for stage in ring:
        for sequence in (1, 2, 3, 4):
            stage.insert(sequence, 64)
    for sequence, length in ((1, 30), (2, 21), (3, 30), (4, 21)):
        forward(ring, [Row(sequence, 0, length)], ids[:length])
    drafts = np.array([90, 91, 92, 80, 81, 82])
    forward(ring, [Row(1, 30, 3, 3), Row(2, 21, 3, 3)], drafts)
    got = forward(ring, [Row(1, 31, 1, 1), Row(2, 23, 1, 1)], np.array([40, 41]))
    forward(ring, [Row(3, 30, 1)], drafts[:1])
    forward(ring, [Row(4, 21, 2)], drafts[3:5])
    want = [forward(ring, [Row(3, 31, 1, 1)], np.array([40])), forward(ring, [Row(4, 23, 1, 1)], np.array([41]))]
    np.testing.assert_allclose(got, np.concatenate(want), atol=TOLERANCE)
