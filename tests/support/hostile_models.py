"""A folder of model directories by which a stranger might try to stop a node, and one good model among them.

`write_hostile_models` answers for each bad one a word that its reason must have.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.checkpoints import TinyModel, write_checkpoint

GOOD = "good"
SECRET = "TOP-SECRET\n"
DEEP = 200_000


def write_hostile_models(root: Path, num_tensors: int = 250_000) -> dict[str, str]:
    """Write all of them below `root / "models"`; beside it lies what their links point to.

    num_tensors: of the model with very many. Answers {name as it is listed: a word of the reason}.
    """
    models = root / "models"
    (root / "secret").write_text(SECRET)
    write_checkpoint(models / GOOD, TinyModel(layers=2))
    for name, (harm, _) in HARM.items():
        harm(write_checkpoint(models / name, TinyModel(layers=2)))
    with_header(many_tensors(num_tensors))(models / "many-tensors")
    return {name.replace("\n", "\\n").replace("\x1b", "\\x1b"): word for name, (_, word) in HARM.items()}


def with_config(**changes: Any) -> Callable[[Path], None]:
    def harm(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return harm


def with_header(change: Callable[[dict[str, Any], int], None]) -> Callable[[Path], None]:
    """The header changed by `change(header, bytes of tensor data)`."""

    def harm(model: Path) -> None:
        file = model / "model.safetensors"
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        change(header, len(data))
        with_raw_header(json.dumps(header).encode(), data)(model)

    return harm


def with_raw_header(header: bytes, data: bytes = b"") -> Callable[[Path], None]:
    def harm(model: Path) -> None:
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)

    return harm


def with_text(name: str, text: str) -> Callable[[Path], None]:
    def harm(model: Path) -> None:
        (model / name).write_text(text)

    return harm


def without(name: str) -> Callable[[Path], None]:
    def harm(model: Path) -> None:
        (model / name).unlink()

    return harm


def with_pipe(name: str) -> Callable[[Path], None]:
    def harm(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return harm


def with_link(name: str, target: str) -> Callable[[Path], None]:
    def harm(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(target)

    return harm


def with_size(name: str, num_bytes: int) -> Callable[[Path], None]:
    """A file with a hole, which takes no room on the disk."""

    def harm(model: Path) -> None:
        os.truncate(model / name, num_bytes)

    return harm


def as_directory(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").mkdir()


def huge_shape(header: dict[str, Any], num_bytes: int) -> None:
    header["model.norm.weight"]["shape"] = [int("9" * 4000)]


def many_tensors(count: int) -> Callable[[dict[str, Any], int], None]:
    """All of them empty, and the last one beyond the end, so that the whole header has to be read to see it."""

    def change(header: dict[str, Any], num_bytes: int) -> None:
        for index in range(count):
            header[f"t{index}"] = {"dtype": "F32", "shape": [0], "data_offsets": [num_bytes, num_bytes]}
        header["beyond"] = {"dtype": "F32", "shape": [1], "data_offsets": [num_bytes, num_bytes + 4]}

    return change


def odd_names(header: dict[str, Any], num_bytes: int) -> None:
    header["\x1b[31m" + "x" * 100_000] = {"dtype": "F32", "shape": [0], "data_offsets": [num_bytes, num_bytes]}


HARM: dict[str, tuple[Callable[[Path], None], str]] = {
    "huge-shape": (with_header(huge_shape), "bad shape"),
    "many-tensors": (lambda model: None, "cut short"),
    "odd-tensor-names": (with_header(odd_names), "name"),
    "deep-header": (with_raw_header(b"[" * DEEP), "not JSON"),
    "deep-entry": (with_raw_header(b'{"a": ' + b'{"x":' * DEEP), "not JSON"),
    "wide-header": (with_raw_header(b'{"a": {"shape": [' + b"[]," * 2**20), "not a safetensors file"),
    "long-header": (with_raw_header(b" "), "not JSON"),
    "billion-layers": (with_config(num_hidden_layers=10**9), "10000"),
    "many-layers": (with_config(num_hidden_layers=10**5), "10000"),
    "wide": (with_config(hidden_size=int("9" * 4000)), "hidden_size"),
    "many-heads": (with_config(num_key_value_heads=2**31 - 1, head_dim=2**31 - 1), "bytes a token"),
    "many-ends": (with_config(eos_token_id=list(range(5000))), "eos_token_id"),
    "long-kind": (with_config(model_type="x" * 10**6), "model_type"),
    "odd-quantisation": (with_config(quantization_config={"quant_method": ["x" * 10**6]}), "quantisation"),
    "deep-config": (with_text("config.json", '{"a":' * DEEP), "not valid JSON"),
    "many-values": (with_text("config.json", "[" + "[]," * 10**6), "values"),
    "long-number": (with_text("config.json", '{"a": ' + "9" * 10**5 + "}"), "not valid JSON"),
    "huge-config": (with_size("config.json", 2**40), "bytes"),
    "huge-tokenizer": (with_size("tokenizer.json", 2**40), "bytes"),
    "huge-weights": (with_size("model.safetensors", 2**40), "its header describes"),
    "no-tokenizer": (without("tokenizer.json"), "no tokenizer.json"),
    "no-weights": (without("model.safetensors"), "neither"),
    "pipe-config": (with_pipe("config.json"), "a pipe"),
    "pipe-tokenizer": (with_pipe("tokenizer.json"), "a pipe"),
    "pipe-tokenizer-config": (with_pipe("tokenizer_config.json"), "a pipe"),
    "pipe-weights": (with_pipe("model.safetensors"), "a pipe"),
    "pipe-generation": (with_pipe("generation_config.json"), "a pipe"),
    "device-config": (with_link("config.json", "/dev/zero"), "leads out"),
    "device-template": (with_link("chat_template.jinja", "/dev/zero"), "leads out"),
    "directory": (as_directory, "a directory"),
    "loop": (with_link("config.json", "config.json"), "form a loop"),
    "to-nowhere": (with_link("tokenizer.json", "missing.json"), "does not exist"),
    "secret-text": (with_link("special_tokens_map.json", "../../secret"), "leads out"),
    "secret-weights": (with_link("model.safetensors", "../../secret"), "leads out"),
    "odd name\n\x1b[31m": (lambda model: None, "other characters"),
}
"""By the name of the directory: (what is done to a good model, a word of the reason)."""
