"""Whatever GGUF files are below a models directory, looking at them ends soon and says in a sentence what is wrong."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.gguf_bytes import ARRAY, F32, I32, TEXT, U32, RawTensor, gguf_bytes, text, value

LOOK = """
import json, resource, sys
from pathlib import Path
from exo_mesh.errors import ModelError
from exo_mesh.weights.store import ModelStore

resource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9))
store, reasons = ModelStore([Path(sys.argv[1])], views_dir=Path(sys.argv[2])), {}
found = store.found()
for name, model_dir in found.models.items():
    try:
        store.card_at(name, model_dir, found.sources.get(model_dir))
        reasons[name] = ""
    except ModelError as exc:
        reasons[name] = str(exc)
print(json.dumps(reasons))
"""

SECRET = "TOP-SECRET"


def model(
    tokens: list[str] | None = None, kind: str = "gpt2", tensors: tuple[RawTensor, ...] = (), **more: bytes
) -> bytes:
    """A whole file of a model with one layer. more: keys, with `__` for a dot; they come last."""
    tokens = ["a", "b", "ab"] if tokens is None else tokens
    sizes = {"embedding_length": 8, "block_count": 1, "attention.head_count": 2, "context_length": 64,
             "feed_forward_length": 8}  # fmt: skip
    entries = {"general.architecture": value(TEXT, "qwen2")} | {f"qwen2.{k}": value(U32, v) for k, v in sizes.items()}
    entries |= {
        "qwen2.attention.layer_norm_rms_epsilon": value(F32, 1e-6),
        "tokenizer.ggml.model": value(TEXT, kind),
        "tokenizer.ggml.pre": value(TEXT, "qwen2"),
        "tokenizer.ggml.tokens": value(ARRAY, (TEXT, tokens)),
        "tokenizer.ggml.merges": value(ARRAY, (TEXT, ["a b"])),
    }
    entries |= {key.replace("__", "."): body for key, body in more.items()}
    embedding = RawTensor("token_embd.weight", (8, 3), 0, bytes(96))
    return gguf_bytes(entries, [embedding, RawTensor("blk.0.attn_norm.weight", (8,), 0, bytes(32)), *tensors])


def runs(count: int) -> list[str]:
    """Tokens each of which is made by very many merges."""
    return [letter * length for letter in map(chr, range(0x4E00, 0x4E00 + count)) for length in range(1, 257)]


SIZE = struct.pack("<Q", 2**62)
HARM: dict[str, tuple[bytes | Callable[[Path], None], str]] = {
    "good": (model(), ""),
    "tensors": (gguf_bytes(num_tensors=2**60), "tensors, more than"),
    "array": (gguf_bytes({"k": struct.pack("<IIQ", ARRAY, U32, 2**62)}), "elements, more than"),
    "hollow": (gguf_bytes({"k": struct.pack("<IIQ", ARRAY, TEXT, 3_999_999) + text("x", 2**30)}), "k has a text of"),
    "wide": (model(tensors=(RawTensor("blk.0.attn_q.weight", (2**40, 8), 0, b""),)), "cut short"),
    "layers": (model(qwen2__block_count=value(U32, 2**31 - 1)), "layers; at most 10000"),
    "deep": (model(qwen2__block_count=value(U32, 9_999)), "no tensors of layer 1"),
    "heads": (model(qwen2__attention__head_count=value(U32, 2**31 - 1)), "key_length is 0"),
    "ids": (model(tokenizer__ggml__eos_token_id=value(U32, 2**32 - 1)), "tokens that end a text"),
    "template": (model(tokenizer__chat_template=value(TEXT, "{{ x }}" * 10_000)), ""),
    "merges": (model(runs(60), "llama", tokenizer__ggml__scores=value(ARRAY, (F32, [0.0] * 60 * 256))), "merges"),
    "types": (model(tokenizer__ggml__token_type=value(ARRAY, (I32, [1, 2**31 - 1, 1]))), "unknown type 2147483647"),
    "surrogate": (model(tokenizer__chat_template=struct.pack("<I", TEXT) + text(b"\xed\xa0\x80")), "not UTF-8"),
    "escape": (model(general__architecture=value(TEXT, "../../x\x1b[31m")), "not the name of an architecture"),
    "shards-00001-of-99999": (model(), "cannot be read: No such file"),
    "pipe": (os.mkfifo, "is a pipe"),
    "folder": (lambda file: file.mkdir(), "is a directory"),
    "secret": (lambda file: file.symlink_to(file.parents[1] / "secret"), "leads out of the model's directory"),
    "device": (lambda file: file.symlink_to("/dev/zero"), "leads out of the model's directory"),
    "loop": (lambda file: file.symlink_to(file.name), "Too many levels"),
}
"""{name: (content of its file or what makes it, a word of the reason)}."""


@pytest.mark.extended
def test_hostile_gguf_files_are_refused_with_their_reasons(tmp_path: Path) -> None:
    """Within 1 GB, in a process of its own, whose children have limits too."""
    models = tmp_path / "models"
    models.mkdir()
    (tmp_path / "secret").write_text(SECRET)
    for name, (content, _) in HARM.items():
        file = models / f"{name}.gguf"
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            content(file)
    child = subprocess.run(
        [sys.executable, "-c", LOOK, str(models), str(tmp_path / "views")],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    reasons = json.loads(child.stdout)
    assert reasons.pop("exo-mesh-demo") == ""
    assert reasons.keys() == {name.removesuffix("-00001-of-99999") for name in HARM}
    for name, (_, word) in HARM.items():
        reason = reasons[name.removesuffix("-00001-of-99999")]
        assert (word in reason) if word else not reason, (name, reason)
        assert len(reason) <= 400 and reason.isprintable() and "failed" not in reason, (name, reason)
        assert str(tmp_path) not in reason and SECRET not in reason, (name, reason)
    assert sorted(path.name for path in (tmp_path / "views").iterdir()) >= ["deep", "good"]
