"""Memory and speed of quantised weights that the torch engine keeps: `python -m tools.bench quantised`.

Memory: the peak of loading each half of a checkpoint with `quantised=on`, without the library, beside the half's bytes
in the files. Speed: decode steps of one sequence and one thread with a smaller checkpoint, beside the same checkpoint
dequantised to float32 and to bfloat16, in turns; the smallest time of all turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exo_mesh.base.telemetry.tables import columns
from exo_mesh.cli.bench.engines import count, parse_size
from exo_mesh.cli.bench.measuring import MeasuringChild, ask_once, engine_command
from exo_mesh.cli.tables import print_json
from exo_mesh.errors import InputError
from exo_mesh.weights.card import read_card
from exo_mesh.weights.random_checkpoint import (
    TinyModel,
    config_json,
    model_of_size,
    tensor_shapes,
    tokenizer_json,
    write_checkpoint,
    write_json,
)

GROUP = 128
DEADLINE_S = 600.0
SMALL = TinyModel(layers=2, hidden=128, heads=2, kv_heads=1, intermediate=128, dtype="bfloat16")
"""Its peak is that of the library alone."""

Parts = Mapping[str, tuple[str, tuple[int, ...]]]
"""By the last part of a tensor's name: dtype in safetensors, shape."""

_ITEM_BYTES = {"I32": 4, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "F8_E4M3": 1}


def _gptq(rows: int, columns: int) -> Parts:
    groups = columns // GROUP
    return {"qweight": ("I32", (columns // 8, rows)), "qzeros": ("I32", (groups, rows // 8)),
            "scales": ("F16", (groups, rows))}  # fmt: skip


def _awq(rows: int, columns: int) -> Parts:
    groups = columns // GROUP
    return {"qweight": ("I32", (columns, rows // 8)), "qzeros": ("I32", (groups, rows // 8)),
            "scales": ("F16", (groups, rows))}  # fmt: skip


def _words(rows: int, columns: int) -> Parts:
    return {"weight_packed": ("I32", (rows, columns // 8)), "weight_scale": ("BF16", (rows, columns // GROUP))}


def _int8(rows: int, columns: int) -> Parts:
    return {"weight": ("I8", (rows, columns)), "weight_scale": ("BF16", (rows, 1))}


def _float8(rows: int, columns: int) -> Parts:
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale_inv": ("F32", (-(-rows // 128), -(-columns // 128)))}


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


FORMATS: Mapping[str, tuple[dict[str, Any], Callable[[int, int], Parts]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, _gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq),
    "compressed-int4": (_compressed("pack-quantized", num_bits=4, type="int", group_size=GROUP), _words),
    "compressed-int8": (_compressed("int-quantized", num_bits=8, type="int", strategy="channel"), _int8),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, _float8),
}
"""By name: quantization_config, and the tensors of a weight."""


@dataclass(frozen=True)
class Stage:
    """The memory of loading one half. over_file: its peak without the library, divided by its bytes in the files."""

    layers: str
    file_bytes: int
    peak_bytes: int
    bare_bytes: int

    @property
    def over_file(self) -> float:
        return (self.peak_bytes - self.bare_bytes) / self.file_bytes


def add_parser(subparsers: Any) -> None:
    """Adds `quantised` to the verbs of `python -m tools.bench`."""
    text = "memory and speed of quantised weights that the torch engine keeps"
    parser = subparsers.add_parser("quantised", help=text, description=__doc__)
    parser.add_argument("--formats", metavar="A,B", default=",".join(FORMATS), help=f"of {', '.join(FORMATS)} (all)")
    parser.add_argument("--memory-of", metavar="SIZE", default="1.8B", help="weights of the model for memory (1.8B)")
    parser.add_argument("--speed-of", metavar="SIZE", default="200M", help="weights of the model for speed (200M)")
    parser.add_argument("--dtype", default="bfloat16", help="of plain weights and activations, for memory (bfloat16)")
    parser.add_argument("--turns", type=count(100), default=10, metavar="N", help="turns (10)")
    parser.add_argument("--no-memory", action="store_true", help="measure the speed only")
    parser.add_argument("--no-speed", action="store_true", help="measure the memory only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures each format and prints the tables. Raises InputError for an unknown format."""
    names = args.formats.split(",")
    if unknown := [name for name in names if name not in FORMATS]:
        raise InputError(f"no format {unknown[0]}; there are {', '.join(FORMATS)}")
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as scratch:
            if not args.no_memory:
                stages = stages_of(Path(scratch), name, model_of_size(parse_size(args.memory_of)), args.dtype)
                found[name]["memory"] = [{**asdict(stage), "over_file": stage.over_file} for stage in stages]
        with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as scratch:
            if not args.no_speed:
                found[name]["step_ms"] = steps_of(Path(scratch), name, parse_size(args.speed_of), args.turns)
    if args.json:
        print_json(found)
    else:
        _print(found)
    return 0


def _print(found: Mapping[str, Mapping[str, Any]]) -> None:
    memory = [
        [name, one["layers"], *(f"{one[key] / 1e6:.0f} MB" for key in ("file_bytes", "peak_bytes", "bare_bytes")),
         f"{one['over_file']:.2f}"]
        for name, figures in found.items() for one in figures.get("memory", ())
    ]  # fmt: skip
    speed = [
        [name, *(f"{figures['step_ms'][how]:.2f}" for how in ("kept", "float32", "bfloat16")),
         f"{figures['step_ms']['kept'] / figures['step_ms']['float32']:.2f}"]
        for name, figures in found.items() if "step_ms" in figures
    ]  # fmt: skip
    if memory:
        print(columns(("FORMAT", "LAYERS", "FILE", "PEAK", "LIBRARY", "PEAK - LIBRARY / FILE"), memory))
    if speed:
        print(columns(("FORMAT", "STEP, KEPT (ms)", "FLOAT32", "BFLOAT16", "KEPT / FLOAT32"), speed))


def stages_of(scratch: Path, name: str, model: TinyModel, dtype: str) -> list[Stage]:
    """The memory of both halves of a model."""
    directory = write_quantised(scratch / "model", model, name)
    small = write_checkpoint(scratch / "small", SMALL)
    card = read_card(directory, "model")
    middle, stop = card.num_layers // 2, card.num_layers
    options = {"quantised": "on", "dtype": dtype, "threads": "1"}
    bare = _peak(small, options, f"0:{SMALL.layers}")
    halves = ((0, middle), (middle, stop))
    return [
        Stage(f"{begin}:{end}", card.shard_bytes(begin, end), _peak(directory, options, f"{begin}:{end}"), bare)
        for begin, end in halves
    ]


def _peak(directory: Path, options: Mapping[str, str], layers: str) -> int:
    command = engine_command("torch", directory, options, DEADLINE_S)
    return int(ask_once([*command, "--what", "peak", "--layers", layers], DEADLINE_S)["peak_bytes"])


def steps_of(scratch: Path, name: str, size: int, turns: int) -> dict[str, float]:
    """Milliseconds of a decode step: kept, and dequantised to float32 and bfloat16."""
    directory = write_quantised(scratch / "model", model_of_size(size), name)
    ways = {
        "kept": {"quantised": "on", "dtype": "float32"},
        "float32": {"dtype": "float32"},
        "bfloat16": {"dtype": "bfloat16"},
    }
    best = dict.fromkeys(ways, float("inf"))
    with contextlib.ExitStack() as stack:
        children = {}
        for way, options in ways.items():
            command = engine_command("torch", directory, {**options, "threads": "1"}, DEADLINE_S)
            children[way] = stack.enter_context(MeasuringChild([*command, "--what", "engine"], DEADLINE_S))
            children[way].read()
        for _ in range(turns):
            for way, child in children.items():
                answer = child.ask("16 8")
                best[way] = min(best[way], 1e3 * answer["decode_s"] / answer["num_steps"])
    return best


def write_quantised(directory: Path, model: TinyModel, name: str) -> Path:
    """Write a checkpoint of random codes in a format; embedding, head and norms are bfloat16."""
    quantisation, make = FORMATS[name]
    directory.mkdir(parents=True)
    config = {**config_json(model), "quantization_config": quantisation}
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer.json", tokenizer_json(model))
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor, shape in tensor_shapes(model).items():
        if ".layers." in tensor and len(shape) == 2:
            module = tensor.removesuffix(".weight")
            tensors |= {f"{module}.{leaf}": part for leaf, part in make(*shape).items()}
        else:
            tensors[tensor] = "BF16", shape
    header, offset = {}, 0
    for tensor, (dtype, shape) in tensors.items():
        end = offset + int(np.prod(shape)) * _ITEM_BYTES[dtype]
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    rng = np.random.default_rng(1)
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        for tensor, (dtype, shape) in tensors.items():
            stream.write(_random(rng, tensor, dtype, int(np.prod(shape))))
    return directory


def _random(rng: np.random.Generator, tensor: str, dtype: str, size: int) -> bytes:
    """Bytes of a tensor: codes of any value, and scales that keep activations small."""
    if dtype in ("I32", "I8", "F8_E4M3"):
        data = np.frombuffer(rng.bytes(size * _ITEM_BYTES[dtype]), np.uint8)
        return (data & 0xBF if dtype == "F8_E4M3" else data).tobytes()  # values below 2, and no NaN
    if "scale" in tensor:
        values = np.full(size, 1e-3 if dtype != "F32" else 2e-2, np.float32)
    else:
        values = np.ones(size, np.float32) if "norm" in tensor else rng.standard_normal(size, np.float32) * 0.02
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(np.float16 if dtype == "F16" else np.float32).tobytes()
