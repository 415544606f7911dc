"""A large lookup table within a layer stays in the files: it takes no memory, and the text is the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from exo_mesh_torch import provider
from exo_mesh_torch.disk_tables import DiskTable
from exo_mesh_torch.sources import Plain
from exo_mesh_torch.survey import survey

from exo_mesh.errors import InputError, ModelError
from exo_mesh.weights.tensors import read_tensor_table
from tools.architectures.torch_families import NUM_LAYERS
from tools.architectures.torch_models import whole_model_logits, write_random_model
from tools.architectures.trials import computed
from tools.stages import Stages

TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_random_model(tmp_path_factory.mktemp("ngrams"), "qwen4_exp_text", split_ngram_parts=3)


def table_bytes(model_dir: Path) -> int:
    return sum(info.num_bytes for name, info in read_tensor_table(model_dir).items() if name.startswith(TABLE))


@pytest.mark.extended
def test_a_ring_with_its_table_in_the_files_has_the_bits_of_the_whole_model(model_dir: Path) -> None:
    assert len([name for name in read_tensor_table(model_dir) if name.startswith(TABLE)]) == 3
    stages = Stages(provider, model_dir, NUM_LAYERS, threads="1", tables="disk")
    np.testing.assert_array_equal(computed(stages.ring((2,))), whole_model_logits(model_dir))
    stages.close()


@pytest.mark.extended
def test_the_table_counts_neither_in_the_survey_nor_in_the_memory_of_the_stage(model_dir: Path) -> None:
    on_disk, in_memory = (survey(model_dir, {"tables": where}) for where in ("disk", "memory"))
    saved = [more - less for more, less in zip(in_memory.layer_bytes, on_disk.layer_bytes, strict=True)]
    assert saved == [table_bytes(model_dir) if index == 1 else 0 for index in range(NUM_LAYERS)]
    held = {}
    for where in ("disk", "memory"):
        stages = Stages(provider, model_dir, NUM_LAYERS, threads="1", tables=where)
        held[where] = stages.ring(())[0].memory_bytes()
        stages.close()
    assert held["memory"] - held["disk"] == table_bytes(model_dir)


def test_rows_are_read_once_each_across_the_files_parts(model_dir: Path) -> None:
    table = read_tensor_table(model_dir)
    parts = [Plain(name, table[name]) for name in sorted(table) if name.startswith(TABLE)]
    whole = torch.cat([part.lines(0, part.shape[0]) for part in parts])
    rows = DiskTable(parts, torch.float32, torch.device("cpu"))
    ids = torch.tensor([[len(whole) - 1, 0, parts[0].shape[0]], [0, parts[0].shape[0] - 1, 1]])
    assert torch.equal(rows(ids), whole[ids])


def test_a_table_that_is_gone_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    model_dir = write_random_model(tmp_path, "qwen4_exp_text")
    table = read_tensor_table(model_dir)
    [name] = [name for name in table if name.startswith(TABLE)]
    rows = DiskTable([Plain(name, table[name])], torch.float32, torch.device("cpu"))
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: .*ngram_embedding.* cannot be read"):
        rows(torch.tensor([3]))


def test_another_place_for_tables_is_refused() -> None:
    with pytest.raises(InputError, match='option tables="tape" is unknown; supported: auto, disk, memory'):
        provider.check_options({"tables": "tape"})
