"""Whatever is in a model's directory, reading it ends soon and says in a sentence without paths what is wrong."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from exo_mesh.errors import ModelError
from exo_mesh.weights import card as card_module
from exo_mesh.weights import card_child
from exo_mesh.weights.card import read_card
from exo_mesh.weights.model_files import MAX_MESSAGE, one_line
from exo_mesh.weights.safetensors import read_tensor_table
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.hostile_models import GOOD, write_hostile_models

READ_ALL = """
import json, resource, sys
from pathlib import Path
from exo_mesh.errors import ModelError
from exo_mesh.weights.store import ModelStore

resource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9))
store, reasons = ModelStore([Path(sys.argv[1])]), {}
found = store.found()
reasons.update(found.misnamed)
for name, model_dir in found.models.items():
    try:
        store.card_at(name, model_dir)
        reasons[name] = ""
    except ModelError as exc:
        reasons[name] = str(exc)
print(json.dumps(reasons))
"""


def test_each_hostile_model_is_refused_with_its_reason(tmp_path: Path) -> None:
    """Within 1 GB, in a process of its own: what takes more would raise a MemoryError, and say so."""
    words = write_hostile_models(tmp_path, num_tensors=20_000)
    models = tmp_path / "models"
    child = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(models)], capture_output=True, text=True, timeout=60, check=True
    )
    reasons = json.loads(child.stdout)
    assert reasons.pop("exo-mesh-demo") == reasons.pop(GOOD) == ""
    assert reasons.keys() == words.keys()
    for name, reason in reasons.items():
        assert words[name] in reason, (name, reason)
        assert len(reason) <= 400 and reason.isprintable() and "failed (" not in reason, (name, reason)
        assert str(tmp_path) not in reason, (name, reason)


def test_a_sentence_about_a_model_is_one_line_of_bounded_length_whatever_is_in_it() -> None:
    assert one_line("a\nb\x1b[31m\u202e") == r"a\nb\x1b[31m\u202e"
    assert len(one_line("\x1b" * 10**6)) == len(one_line("a" * 10**6)) == MAX_MESSAGE
    assert one_line("a" * MAX_MESSAGE) == "a" * MAX_MESSAGE


def test_the_digest_is_of_one_text_however_many_parts_it_is_made_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, TinyModel(layers=2))
    config, table = json.loads((tmp_path / "config.json").read_text()), read_tensor_table(tmp_path)
    rows = [[name, info.dtype, info.shape] for name, info in sorted(table.items())]
    expected = hashlib.sha256(json.dumps([config, rows], sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(table):
        expected.update(table[name].file.read_bytes()[table[name].start :][:256])
    for num_rows in (1, 5, 4096):
        monkeypatch.setattr(card_module, "_ROWS", num_rows)
        assert read_card(tmp_path, "tiny").digest == expected.hexdigest()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_large_checkpoint_is_read_in_a_child_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    monkeypatch.setattr(card_child, "LARGE_BYTES", 100)
    write_checkpoint(tmp_path / "m", TinyModel(layers=2, shards=shards))
    monkeypatch.setattr(card_child, "read_card", None)  # this process must not
    assert card_child.read_card_within_limits(tmp_path / "m", "tiny") == read_card(tmp_path / "m", "tiny")
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"^m: config\.json has no usable num_hidden_layers: null$"):
        card_child.read_card_within_limits(tmp_path / "m", "tiny")


def test_a_read_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_child, "LARGE_BYTES", 100)
    monkeypatch.setattr(card_child, "LIMIT_S", 0.001)
    write_checkpoint(tmp_path / "m", TinyModel(layers=2))
    with pytest.raises(ModelError, match="m: reading its headers takes more than"):
        card_child.read_card_within_limits(tmp_path / "m", "tiny")
