"""Splits of mlx-lm's architectures give the bits of the whole model; docs/reference/architectures.md lists them.

Windows are shorter than the prompt, so rotating caches wrap; weights get noise, so that no two layers are alike.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

from exo_mesh_mlx import provider
from exo_mesh_mlx.engine import MlxStage

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageInput
from exo_mesh.errors import ModelError
from tools.architectures.check import check
from tools.architectures.mlx_configs import architectures, tiny_config
from tools.architectures.mlx_models import write_checkpoint
from tools.architectures.outcome import Outcome
from tools.architectures.pages import MLX as PAGE
from tools.architectures.sizes import LAYERS, VOCAB
from tools.architectures.table import rows, summary

IDS = np.random.default_rng(11).integers(0, VOCAB, 47).tolist()

DIVERSE = {
    "gpt2": (5, "full"),  # other names for layers and sizes
    "deepseek_v3": (5, "latent"),
    "gemma3_text": (5, "window"),  # masks from cache entries that lie on another stage
    "qwen3_next": (5, "recurrent"),  # attention in some layers, recurrent state in others
    "ministral3": (5, "window"),  # entry 0's offset serves every layer, though its kind lies elsewhere
    "rwkv7": (5, "recurrent"),  # a value of layer 0 that every layer uses
    "hunyuan": (5, "full"),  # keys and values of one layer used by the next
    "afm7": (3, "full"),  # later layers use the caches of earlier ones
}
"""{architecture: (legal cuts, a kind of KV that it has)}"""


QUICK = ("gemma3_text",)
"""Windows that wrap."""


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.extended) for name in DIVERSE],
)
def test_a_split_model_has_the_bits_of_the_whole(architecture: str) -> None:
    outcome = check("mlx", architecture, few=True)
    assert (outcome.state, outcome.reason, outcome.different) == ("exact", "", {})
    assert outcome.splits == 3
    cuts, kind = DIVERSE[architecture]
    assert outcome.cuts == tuple(range(1, cuts + 1)) and kind in outcome.traits["kv"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", architectures())
def test_every_architecture_that_runs_at_all_runs_right(architecture: str) -> None:
    outcome = check("mlx", architecture)
    assert outcome.state != "failed", (outcome.reason, outcome.different)


def test_the_page_lists_every_architecture_of_the_mlx_lm_that_it_names() -> None:
    versions = dict(re.findall(r"(mlx|mlx-lm) (\d[\w.]*\w)", PAGE.read().split("|")[0]))
    assert set(versions) == {"mlx", "mlx-lm"}
    if versions["mlx-lm"] == metadata.version("mlx-lm"):
        assert sorted(PAGE.states()) == sorted(architectures())


def test_nearly_all_that_runs_at_all_is_split_and_counted() -> None:
    states = [*PAGE.states().values()]
    assert states.count("exact") >= 0.95 * (len(states) - states.count("absent"))
    assert summary(states) in PAGE.read()


def test_nearly_all_can_be_cut_back_by_drafts() -> None:
    able = [row.split(" | ")[5] for name, row in PAGE.rows().items() if PAGE.states()[name] == "exact"]
    numbers = [int(rollback.replace("any", "99").replace("none", "0").split(" ")[0]) for rollback in able]
    assert sum(number >= 4 for number in numbers) >= 0.95 * len(numbers)


def test_rows_of_an_earlier_page_are_kept_only_if_it_is_of_the_same_versions() -> None:
    page = PAGE.read().replace("Versions: ", "Versions: older ")
    new = Outcome("llama", "failed", "a reason")
    part = PAGE.render([new], page).partition("\n## ")[0]
    assert [*rows(part).values()] == ["| `llama` |  |  |  |  |  |  |  | **fails**: a reason |"]
    kept = PAGE.render([new], f"# Architectures\nVersions: {PAGE.versions}.\n| `gpt2` | 6 | | | | | | | exact |\n")
    assert "Of 2 architectures, 1 are exact" in kept and "1 fail." in kept


def test_a_page_keeps_the_parts_of_other_engines_and_rows_for_which_more_was_tried() -> None:
    page = PAGE.read()
    assert PAGE.render([], page) == page
    before = rows(page)["llama"]
    few = PAGE.render([Outcome("llama", "exact", cuts=(1,), splits=3)], page, few=True)
    assert rows(few.partition("\n## ")[0])["llama"] == rows(page.partition("\n## ")[0])["llama"] != before
    traits = {"kv": ("full",), "rollback": "7"}
    less = PAGE.render([Outcome("llama", "exact", cuts=(1,), splits=3, traits=traits)], page, few=True)
    assert [rows(one.partition("\n## ")[0])["llama"].split(" | ")[5] for one in (few, less)] == ["32", "7"]
    worse = PAGE.render([Outcome("llama", "failed", "a reason")], page, few=True)
    assert "**fails**: a reason" in rows(worse.partition("\n## ")[0])["llama"]


def test_the_page_tells_rows_that_attend_together_from_rows_that_only_share_a_forward() -> None:
    cells = [PAGE.row(Outcome("a", "exact", traits={"together": how})).split(" | ") for how in ("no", "in blocks")]
    assert [row[6] for row in cells] == ["no", "in blocks"]


@pytest.fixture
def stage() -> MlxStage:
    return MlxStage()


def load(stage: MlxStage, directory: Path, architecture: str, start: int, stop: int) -> MlxStage:
    model_dir = write_checkpoint(directory, tiny_config(architecture))
    stage.load(LoadRequest(Shard("m", start, stop, LAYERS), model_dir, 512), lambda done, total: None)
    return stage


def test_a_cut_inside_shared_caches_is_refused(stage: MlxStage, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="layers 5 to 5 cannot run by themselves, because they use data of other"):
        load(stage, tmp_path, "afm7", 5, 6)


def test_a_model_that_mlx_lm_cannot_run_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    config = tiny_config("afm7")
    model_dir = write_checkpoint(tmp_path, config | {"num_kv_reuse_layers": config["num_layers"]})
    with pytest.raises(ModelError, match=r"config\.json: mlx-lm's code cannot run the model"):
        provider.survey(model_dir, {})


def test_a_looped_model_runs_whole_or_not_at_all(stage: MlxStage, tmp_path: Path) -> None:
    outcome = check("mlx", "nanbeige")
    assert (outcome.state, outcome.different) == ("whole", {}) and "looped" in outcome.reason
    with pytest.raises(ModelError, match="looped"):
        load(stage, tmp_path, "nanbeige", 0, 4)


@pytest.mark.parametrize("architecture", ["mamba2", "gemma3_text"])
def test_caches_that_cannot_go_back_to_every_position_say_so_and_fault_only_then(
    stage: MlxStage, tmp_path: Path, architecture: str
) -> None:
    load(stage, tmp_path, architecture, 0, 4)
    assert not stage.capabilities.cuts_anywhere
    stage.insert(1, 64)
    send = lambda row: stage.forward(StageInput((row,), tuple(IDS[row.pos0 : row.pos0 + row.n]), {})).faults  # noqa: E731
    assert not send(Row(1, 0, 20))
    assert not send(Row(1, 20, 1))
    (fault,) = send(Row(1, 19, 1))
    assert (fault.sequence, fault.code) == (1, "bad_row")
    assert "cannot be cut back from 21 to 19" in fault.message
    assert not send(Row(1, 21, 1))
    assert not send(Row(1, 0, 20))
    stage.close()
