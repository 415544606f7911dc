"""The dummy engine: the same text for any split, a real cost, and a sharp eye for frames that went wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from exo_mesh_dummy import provider
from exo_mesh_dummy.payload import Payloads

from exo_mesh.domain.frame import HIDDEN, Row
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import LoadRequest, StageEngine, StageInput
from exo_mesh.errors import EngineError, InputError, ModelError
from tests.support.checkpoints import TinyModel, tokenizer_json, write_checkpoint, write_json
from tests.support.ring import Ring


def generate(model_dir: Path, cuts: Sequence[int], num_tokens: int, chunk: int) -> list[int]:
    """Greedy tokens after a prompt of ten, prefilled in chunks."""
    ring = Ring(provider, model_dir, 6, cuts)
    ring.insert(1)
    ids = list(range(40, 50))
    for pos0 in range(0, 10, chunk):
        part = ids[pos0 : pos0 + chunk]
        logits = ring.forward([Row(1, pos0, len(part), 1)], np.array(part, np.int32))
    while len(ids) < 10 + num_tokens:
        ids.append(int(logits[-1].argmax()))
        logits = ring.forward([Row(1, len(ids) - 1, 1, 1)], np.array(ids[-1:], np.int32))
    return ids[10:]


@pytest.mark.parametrize("cuts", [(3,), (1, 2), (1, 2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 10])
def test_the_text_does_not_depend_on_the_split_or_the_chunks(tmp_path: Path, cuts: Sequence[int], chunk: int) -> None:
    write_checkpoint(tmp_path, TinyModel())
    text = generate(tmp_path, cuts, 40, chunk)
    assert text == generate(tmp_path, (), 40, 10)
    assert len(set(text)) > 10


def test_tokens_are_printable(tmp_path: Path) -> None:
    model = TinyModel()
    write_checkpoint(tmp_path, model)
    names = {i: token for token, i in tokenizer_json(model)["model"]["vocab"].items()}
    assert all(
        names[i].isascii() and names[i].isprintable() and len(names[i]) == 1 for i in generate(tmp_path, (), 60, 10)
    )


def test_without_a_model_directory_ids_are_bytes(tmp_path: Path) -> None:
    assert all(32 <= i < 127 for i in generate(tmp_path / "nothing", (2,), 30, 10))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_broken_model_directory_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("{")
    with pytest.raises(ModelError, match=file):
        load(tmp_path, 0, 6)
    write_json(tmp_path / file, [])
    with pytest.raises(ModelError, match=file):
        load(tmp_path, 0, 6)


def load(model_dir: Path, start: int, stop: int, **options: str) -> StageEngine:
    stage = provider.create()
    stage.load(LoadRequest(Shard("tiny", start, stop, 6), model_dir, 512, options), lambda done, total: None)
    stage.insert(1, 64)
    return stage


def send(stage: StageEngine, row: Row, ids: Sequence[int], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(stage.forward(StageInput((row,), tuple(ids), tensors)).tensors)


def test_activations_that_skipped_a_stage_are_noticed(tmp_path: Path) -> None:
    first, _, last = (load(tmp_path, *layers) for layers in ((0, 2), (2, 4), (4, 6)))
    hidden = send(first, Row(1, 0, 2), [5, 6], {})
    with pytest.raises(EngineError, match=r"wrong activations: .* expected \[0, 5, 4,"):
        send(last, Row(1, 0, 2, 1), [5, 6], hidden)


@pytest.mark.parametrize(("row", "ids"), [(Row(1, 1, 2), [5, 6]), (Row(1, 0, 2), [5, 7])], ids=["position", "token"])
def test_activations_of_other_positions_or_tokens_are_noticed(tmp_path: Path, row: Row, ids: list[int]) -> None:
    first, second = load(tmp_path, 0, 2), load(tmp_path, 2, 6)
    send(second, Row(1, 0, 1), [5], send(first, Row(1, 0, 1), [5], {}))
    hidden = send(first, Row(1, 0, 2), [5, 6], {})
    with pytest.raises(EngineError, match="wrong activations"):
        send(second, row, ids, hidden)


def test_one_flipped_bit_is_noticed(tmp_path: Path) -> None:
    first, second = load(tmp_path, 0, 2), load(tmp_path, 2, 6)
    hidden = send(first, Row(1, 0, 2), [5, 6], {})[HIDDEN]
    data = bytearray(hidden.data)
    data[-1] ^= 1
    with pytest.raises(EngineError, match="wrong activations"):
        send(second, Row(1, 0, 2), [5, 6], {HIDDEN: Tensor(hidden.dtype, hidden.shape, data)})


def test_the_payload_is_as_large_as_asked(tmp_path: Path) -> None:
    row = Row(1, 0, 3)
    sizes = {
        asked: send(load(tmp_path, 0, 2, payload_bytes=asked), row, [1, 2, 3], {})[HIDDEN].num_bytes
        for asked in ("0", "4096", "1")
    }
    assert sizes == {"0": 3 * 512, "4096": 3 * 4096, "1": 3 * 16}


def test_long_payloads_are_used_again_but_never_while_somebody_holds_them() -> None:
    payloads = Payloads()
    first = payloads.get(4096, [512])
    tail = first[-8:]
    first[:4] = tail[:4] = b"mark"
    del first
    second = payloads.get(4096, [512])
    assert bytes(tail[:4]) == b"mark" and bytes(second) == bytes(4096 * 512)
    del tail
    assert bytes(payloads.get(4096, [512])[:4]) == b"mark"
    del second
    assert bytes(payloads.get(4096, [256, 256])) == bytes(4096 * 512)


def test_the_cost_is_waited_for_per_forward_and_per_row(tmp_path: Path) -> None:
    stage = load(tmp_path, 0, 2, cost_ms="20", row_cost_ms="15")
    stage.insert(2, 8)
    begin = time.monotonic()
    stage.forward(StageInput((Row(1, 0, 1), Row(2, 0, 1)), (1, 2), {}))
    assert time.monotonic() - begin >= 0.050


def test_it_fails_when_told_to(tmp_path: Path) -> None:
    stage = load(tmp_path, 0, 2, fail_at="2")
    send(stage, Row(1, 0, 1), [1], {})
    with pytest.raises(EngineError, match="forward 2 fails"):
        send(stage, Row(1, 1, 1), [1], {})


@pytest.mark.parametrize("options", [{"cots_ms": "3"}, {"cost_ms": "fast"}, {"cost_ms": "-1"}, {"fail_at": "nan"}])
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        load(tmp_path, 0, 2, **options)
