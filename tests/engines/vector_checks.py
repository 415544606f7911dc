"""What every engine that gives final hidden states must show, on a ring of one, two or three stages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import EngineProvider
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.ring import Ring

IDS = np.random.default_rng(11).integers(3, 290, 96).astype(np.int32)
CUTS = [(), (3,), (1, 4)]
LONG, SHORT = 41, 23


def check_states(ring: Ring, want_long: np.ndarray, want_short: np.ndarray, slack: float) -> None:
    """The states of IDS[:LONG] and of the SHORT ids after it: each text in chunks, beside another text, and beside rows
    that want logits or nothing."""
    ids = IDS
    ring.insert(1, 2, 3)
    first = ring.final_states([Row(1, 0, 20, num_hidden=20)], ids[:20])
    rows = [Row(1, 20, LONG - 20, num_hidden=LONG - 20), Row(3, 0, 5), Row(2, 0, SHORT, num_hidden=SHORT)]
    given = np.concatenate([ids[20:LONG], ids[:5], ids[LONG : LONG + SHORT]])
    rest = ring.final_states(rows, given)
    np.testing.assert_allclose(np.concatenate([first, rest[: LONG - 20]]), want_long, rtol=0, atol=slack)
    np.testing.assert_allclose(rest[LONG - 20 :], want_short, rtol=0, atol=slack)
    ring.remove(1, 2, 3)

    ring.insert(4, 5)
    last = ring.final_states([Row(4, 0, SHORT, num_hidden=1)], ids[LONG : LONG + SHORT])
    np.testing.assert_allclose(last, want_short[-1:], rtol=0, atol=slack)
    mixed = [Row(5, 0, 7, 2), Row(4, SHORT - 3, 3, num_hidden=2)]
    again = ring.final_states(mixed, np.concatenate([ids[:7], ids[LONG + SHORT - 3 : LONG + SHORT]]))
    np.testing.assert_allclose(again, want_short[-2:], rtol=0, atol=slack)
    ring.remove(4, 5)


def write_body_alone(directory: Path, model: TinyModel) -> Path:
    """A checkpoint whose names lack the prefix `model.`, as those of models that were saved without a head."""
    write_checkpoint(directory, model)
    file = directory / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = {name.removeprefix("model."): entry for name, entry in json.loads(raw[8 : 8 + size]).items()}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    return directory


def check_body_alone(provider: EngineProvider, directory: Path) -> None:
    """Its states are those of the same checkpoint with full names."""
    model = TinyModel("qwen3", layers=4, tied=True)
    write_checkpoint(directory / "full", model)
    write_body_alone(directory / "bare", model)
    found = []
    for name in ("full", "bare"):
        ring = Ring(provider, directory / name, 4, (2,))
        ring.insert(1)
        found.append(ring.final_states([Row(1, 0, SHORT, num_hidden=SHORT)], IDS[:SHORT]))
        ring.close()
    np.testing.assert_array_equal(*found)
