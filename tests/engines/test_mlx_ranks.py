"""The MLX engine as ranks of a tensor group, two processes over MLX's ring collectives: right, checked, half as big."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

from exo_mesh_mlx import provider
from exo_mesh_mlx.ranks import AGREE_EVERY

from exo_mesh.domain.frame import Row
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.heavy import checkpoint_bytes
from tests.support.ranks import Job, run_ranks
from tests.support.ring import Ring

pytestmark = pytest.mark.timeout(400)

LAYERS = 2
TOKENS = np.random.default_rng(11).integers(0, 250, 200).tolist()
CHUNK = 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), TinyModel("llama", layers=LAYERS))


Frame = tuple[list[tuple[int, int, int, int]], list[int]]


def frames() -> list[Frame]:
    """Two prompts in chunks, decode rows of both together, a step back with drafts, and a prompt computed again."""
    return [
        ([(1, 0, 17, 17)], TOKENS[:17]),
        ([(2, 0, 9, 9)], TOKENS[20:29]),
        ([(1, 17, 12, 12)], TOKENS[30:42]),
        *(([(1, 29 + i, 1, 1), (2, 9 + i, 1, 1)], TOKENS[50 + 2 * i : 52 + 2 * i]) for i in range(3)),
        ([(1, 30, 3, 3)], TOKENS[70:73]),
        ([(2, 0, 5, 5)], TOKENS[80:85]),
    ]


def alone(model_dir: Path, wanted: list[Frame]) -> list[np.ndarray]:
    ring = Ring(provider, model_dir, LAYERS, ())
    ring.insert(1, 2, max_tokens=512)
    logits = [ring.forward([Row(*row) for row in rows], np.array(ids)) for rows, ids in wanted]
    ring.close()
    return logits


def test_a_group_is_checked_and_gives_what_one_process_gives_from_half_of_the_bytes(
    llama: Path, tmp_path: Path
) -> None:
    outcomes = run_ranks(Job(llama, (0, LAYERS, LAYERS), frames(), verify_chunk=CHUNK), tmp_path)
    assert [outcome.answer.get("error") for outcome in outcomes] == [None, None], outcomes
    for rank, outcome in enumerate(outcomes):
        got = np.load(tmp_path / f"{rank}.npz")
        for index, expected in enumerate(alone(llama, frames())):
            np.testing.assert_allclose(got[f"logits{index}"], expected, atol=1e-4, rtol=0)
        assert outcome.answer["split"] * 2 == outcome.answer["full"]
        assert {name.split(".", 1)[1] for name in outcome.answer["whole"]} == {
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
        }
        heads = TinyModel().kv_heads // 2
        assert outcome.answer["kv_heads"] == [heads] * LAYERS * 2, "of each layer of two sequences"
        assert outcome.answer["checked_kv_heads"] == heads
        assert 0 < outcome.answer["worst"] < 1e-5
        assert outcome.answer["chunk_s"] > 0 and outcome.answer["all_reduce_s"] > 0, "both are measured"


@pytest.mark.extended
@pytest.mark.extended
def test_a_forward_takes_two_all_reduces_for_each_layer(llama: Path, tmp_path: Path) -> None:
    wanted = frames()[:3]
    outcomes = run_ranks(Job(llama, (0, LAYERS, LAYERS), wanted), tmp_path)
    assert [outcome.answer["reduces"] for outcome in outcomes] == [2 * LAYERS * len(wanted)] * 2


@pytest.mark.extended
def test_a_sequence_is_copied_on_every_rank(llama: Path, tmp_path: Path) -> None:
    """One goes on from its own prefill, one from a copy of it, and one from a copy of fewer positions."""
    wanted: list[Frame] = [
        ([(1, 0, 12, 1)], TOKENS[:12]),
        ([(2, 12, 1, 1)], TOKENS[12:13]),
        ([(1, 12, 1, 1)], TOKENS[12:13]),
        ([(3, 9, 4, 1)], TOKENS[9:13]),
    ]
    job = Job(llama, (0, LAYERS, LAYERS), wanted, copies={1: (1, 2, 12), 3: (1, 3, 9)})
    outcomes = run_ranks(job, tmp_path)
    assert [outcome.answer.get("error") for outcome in outcomes] == [None, None], outcomes
    for rank in range(len(outcomes)):
        got = np.load(tmp_path / f"{rank}.npz")
        for index in (1, 3):
            np.testing.assert_allclose(got[f"logits{index}"], got["logits2"], atol=1e-4, rtol=0)


@pytest.mark.extended
def test_sequences_share_their_beginning_on_every_rank(llama: Path, tmp_path: Path) -> None:
    """One computes the prompt; two copies decode with it, one of them alone for a while, and then all three."""
    prompt = (TOKENS * 2)[:260]
    together: Frame = ([(1, 260, 1, 1), (2, 260, 1, 1), (3, 260, 1, 1)], TOKENS[:3])
    lone: list[Frame] = [([(2, 261 + i, 1, 1)], [TOKENS[i]]) for i in range(6)]
    wanted: list[Frame] = [
        ([(1, 0, 260, 1)], prompt),
        ([(2, 260, 1, 1)], TOKENS[9:10]),
        together,
        *lone,
        ([(1, 261, 2, 2), (3, 261, 2, 2)], TOKENS[4:8]),
    ]
    job = Job(llama, (0, LAYERS, LAYERS), wanted, copies={1: (1, 2, 260), 2: (1, 3, 260)})
    outcomes = run_ranks(job, tmp_path)
    assert [outcome.answer.get("error") for outcome in outcomes] == [None, None], outcomes
    assert [outcome.answer["shared"] for outcome in outcomes] == [[260] * 3] * 2
    after = [[*prompt, TOKENS[0], *TOKENS[4:6]], [*prompt, TOKENS[1], *TOKENS[:6]], [*prompt, TOKENS[2], *TOKENS[6:8]]]
    one, two, three = alone(llama, [([(1, 0, len(tokens), 1)], tokens) for tokens in after])
    for rank in range(len(outcomes)):
        got = np.load(tmp_path / f"{rank}.npz")
        last = got[f"logits{len(wanted) - 1}"]
        for made, expected in ((last[1:2], one), (got[f"logits{len(wanted) - 2}"], two), (last[3:], three)):
            np.testing.assert_allclose(made, expected, atol=1e-4, rtol=0)


@pytest.mark.extended
def test_the_check_finds_noise_that_one_rank_makes_beyond_the_second_chunk(llama: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(Job(llama, (0, LAYERS, LAYERS), verify_chunk=32, spoil="noise"), tmp_path)
    (leader, said), (follower, heard) = (outcome.answer["error"] for outcome in outcomes)
    assert leader == follower == "CanaryError"
    assert "layers 0 to 0" in said and "of 32 tokens of chunk 3 by more than 0.001" in said
    assert "the leader finds that layers 0 to 0 are wrong" in heard


@pytest.mark.extended
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ("diverge", "rank 1 has another result than the leader"),
        ("astray", "rank 1 is out of step: it computed forward 64 of 2 tokens, the leader forward 64 of 1 tokens"),
    ],
)
def test_a_rank_that_makes_something_else_of_a_frame_is_found_while_serving(
    llama: Path, tmp_path: Path, spoil: str, says: str
) -> None:
    wanted: list[Frame] = [([(1, place, 1, 1)], [TOKENS[place]]) for place in range(AGREE_EVERY + 1)]
    good = run_ranks(Job(llama, (0, LAYERS, LAYERS), wanted), tmp_path)
    assert [outcome.answer.get("error") for outcome in good] == [None, None]
    outcomes = run_ranks(Job(llama, (0, LAYERS, LAYERS), wanted, spoil=spoil), tmp_path)
    for outcome in outcomes:
        kind, message = outcome.answer["error"]
        assert kind == "CanaryError" and says in message


@pytest.mark.extended
def test_a_later_stage_takes_hidden_states_of_no_group(llama: Path, tmp_path: Path) -> None:
    """The canary begins with made-up hidden states there."""
    outcomes = run_ranks(Job(llama, (1, LAYERS, LAYERS), verify_chunk=CHUNK), tmp_path)
    assert [outcome.answer.get("error") for outcome in outcomes] == [None, None], outcomes
    assert 0 < outcomes[0].answer["worst"] < 1e-5


@pytest.mark.slow
def test_loading_takes_less_memory_than_loading_all(tmp_path: Path) -> None:
    """Of a checkpoint of 512 MB each rank may take 0.7 of what one process takes, besides the libraries that both
    import: these are a third of a process here, and nothing of a real model."""
    checkpoint_bytes(3.0, [550_000_000])  # one process that holds all of it, then two with half of it each
    model = TinyModel("llama", 8, 1024, 16, 16, 4096, 2048, dtype="float32")
    model_dir = write_checkpoint(tmp_path / "model", model)
    size = (model_dir / "model.safetensors").stat().st_size
    assert 500e6 < size < 600e6
    measured = subprocess.run(
        [sys.executable, "-m", "exo_mesh.rings.runner.asking.measure", "mlx", str(model_dir),
         "--what", "peak", "--layers", "0:8"],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    full = int(measured.stdout.split('"peak_bytes": ')[1].split(",")[0])
    answers = [outcome.answer for outcome in run_ranks(Job(model_dir, (0, 8, 8)), tmp_path)]
    libraries = max(answer["before"] for answer in answers)
    peaks = [round(answer["peak"] / 1e6) for answer in answers]
    print(f"MB: file {size / 1e6:.0f}, libraries {libraries / 1e6:.0f}, one process {full / 1e6:.0f}, ranks {peaks}")
    assert max(answer["peak"] for answer in answers) - libraries <= 0.7 * (full - libraries)
