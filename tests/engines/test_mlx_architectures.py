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
from tools.architectures.check import Outcome, check
from tools.architectures.checkpoint import write_checkpoint
from tools.architectures.configs import architectures, tiny_config
from tools.architectures.sizes import LAYERS, VOCAB
from tools.architectures.table import render, versions

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
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
    outcome = check(architecture, few=True)
    assert (outcome.state, outcome.reason, outcome.different) == ("split", "", {})
    assert outcome.splits == 3
    cuts, kind = DIVERSE[architecture]
    assert outcome.legal_cuts == tuple(range(1, cuts + 1)) and kind in outcome.kv


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", architectures())
def test_every_architecture_that_runs_at_all_runs_right(architecture: str) -> None:
    outcome = check(architecture)
    assert outcome.state != "failed", (outcome.reason, outcome.different)


def table() -> dict[str, str]:
    """{architecture: result} as the page says."""
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return {row[0].strip("`"): row[-1] for row in rows if row[0].startswith("`")}


def test_the_page_lists_every_architecture_of_the_mlx_lm_that_it_names() -> None:
    versions = dict(re.findall(r"(mlx|mlx-lm) (\d[\w.]*\w)", PAGE.read_text(encoding="utf-8").split("|")[0]))
    assert set(versions) == {"mlx", "mlx-lm"}
    if versions["mlx-lm"] == metadata.version("mlx-lm"):
        assert sorted(table()) == sorted(architectures())


def test_the_page_gives_a_reason_for_all_that_does_not_split() -> None:
    results = table()
    split = [name for name, result in results.items() if result == "equal"]
    others = {name: result for name, result in results.items() if result != "equal"}
    assert all(len(result.partition(": ")[2]) > 10 for result in others.values()), others
    ran = [name for name, result in results.items() if not result.startswith("not run here")]
    assert len(split) >= 0.95 * len(ran)
    counted = re.search(
        r"Of (\d+) architectures, mlx-lm itself runs (\d+) here. Of these (\d+) ", PAGE.read_text("utf-8")
    )
    assert counted and tuple(map(int, counted.groups())) == (len(results), len(ran), len(split))


def test_rows_of_an_earlier_page_are_kept_only_if_it_is_of_the_same_versions() -> None:
    page = PAGE.read_text(encoding="utf-8").replace("Versions: ", "Versions: older ")
    new = Outcome("llama", "failed", "a reason")
    assert [line for line in render([new], page).splitlines() if line.startswith("| `")] == [
        "| `llama` |  |  |  |  |  |  |  | **fails**: a reason |"
    ]
    kept = render([new], f"Versions: {versions()}.\n| `gpt2` | 6 | | | | | | | equal |\n")
    assert "Of 2 architectures, mlx-lm itself runs 2 here. Of these 1 (50.0 %)" in kept and "1 fail." in kept


def test_the_page_tells_rows_that_attend_together_from_rows_that_only_share_a_forward() -> None:
    found = {}
    for name, batched, in_blocks in (("a", False, False), ("b", True, False), ("c", True, True)):
        page = render([Outcome(name, "split", kv=("full",), batched=batched, in_blocks=in_blocks)])
        found[name] = next(line for line in page.splitlines() if line.startswith("| `")).split(" | ")[6]
    assert found == {"a": "no", "b": "yes", "c": "in blocks"}


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
    outcome = check("nanbeige")
    assert (outcome.state, outcome.different) == ("whole", {}) and "looped" in outcome.reason
    with pytest.raises(ModelError, match="looped"):
        load(stage, tmp_path, "nanbeige", 0, 4)


@pytest.mark.parametrize("architecture", ["mamba2", "gemma3_text"])
def test_caches_that_cannot_go_back_say_so_and_fault_only_then(
    stage: MlxStage, tmp_path: Path, architecture: str
) -> None:
    load(stage, tmp_path, architecture, 0, 4)
    assert stage.capabilities.rollback == "none"
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
