"""What it costs to load a stage of the llama.cpp engine from a GGUF file: `python -m tools.bench llama-load`.

A random Llama in each type is cut in two halves and taken whole. A process loads each part as a runner does, makes
its first context and computes a token. The figures are the CPU seconds of that process from the call to the first
token (without its imports and without opening the library), the memory that it then has, and the most that it had, less
what it had before the call, against the bytes of the part's tensors in the file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from exo_mesh_llamacpp.types import Q4_0, Q8_0, GgmlType

from exo_mesh.cli.bench.engines import parse_size
from exo_mesh.domain.frame import HIDDEN, Row
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import LoadRequest, StageInput
from exo_mesh.errors import EngineError
from exo_mesh.rings.hosting.runner_child import RUNNER_ENVIRONMENT
from exo_mesh.weights.random_checkpoint import TinyModel, model_of_size
from tools.bench.random_gguf import matrices, write_random_gguf

DEADLINE_S = 300.0


@dataclass(frozen=True)
class Loaded:
    """One line of the table. share_bytes: of the part's tensors in the file. held_bytes: after the first token."""

    size: str
    kind: str
    layers: str
    share_bytes: int
    held_bytes: int
    peak_bytes: int
    cpu_s: float


def add_parser(subparsers: Any) -> None:
    """Adds the benchmark."""
    parser = subparsers.add_parser("llama-load", help="memory and time to load llama.cpp stages", description=__doc__)
    parser.add_argument("--sizes", default="200M,1780M", metavar="A,B", help="weights of the random Llamas")
    parser.add_argument("--types", default="q4_0,q8_0", metavar="A,B")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the table."""
    found = []
    for size in args.sizes.split(","):
        for kind in args.types.split(","):
            for line in measured(size, kind):
                found.append(line)
                if not args.json:
                    print(_text(line), flush=True)
    if args.json:
        print(json.dumps([asdict(line) for line in found]))
    return 0


def measured(size: str, kind: str) -> list[Loaded]:
    """Both halves, and the whole. Raises EngineError if the engine is not installed or a process fails."""
    from exo_mesh_llamacpp import provider

    if not (look := provider.availability()).available:
        raise EngineError(f"{look.reason} ({look.remedy})")
    kinds = {"q4_0": Q4_0, "q8_0": Q8_0}
    if kind not in kinds:
        raise EngineError(f"{kind} is not one of {', '.join(kinds)}")
    model = model_of_size(parse_size(size))
    half = model.layers // 2
    with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as scratch:
        write_random_gguf(Path(scratch) / "model.gguf", model, kinds[kind])
        spans = ((0, half), (half, model.layers), (0, model.layers))
        return [_of_span(size, model, kinds[kind], Path(scratch), span) for span in spans]


def _text(line: Loaded) -> str:
    held, peak = (count / line.share_bytes for count in (line.held_bytes, line.peak_bytes))
    return (
        f"{line.size:6s} {line.kind} layers {line.layers:6s} {line.share_bytes / 1e6:7.1f} MB in the file, holds "
        f"{line.held_bytes / 1e6:7.1f} MB ({held:.3f} x), peak {line.peak_bytes / 1e6:7.1f} MB ({peak:.3f} x), first "
        f"token after {line.cpu_s:.2f} s of CPU time"
    )


def _of_span(size: str, model: TinyModel, kind: GgmlType, directory: Path, span: tuple[int, int]) -> Loaded:
    share = _share_bytes(model, kind, span)
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    os.environ.update(RUNNER_ENVIRONMENT)  # the allocator of the child reads it when it starts
    process = context.Process(target=_load, args=(far, directory, span, model.layers))
    process.start()
    far.close()
    try:
        if not near.poll(DEADLINE_S):
            raise EngineError(f"a stage of layers {span} is not ready within {DEADLINE_S:.0f} s")
        held, peak, cpu_s = near.recv()
    except EOFError as exc:
        raise EngineError("a loading process ended; its message is above") from exc
    finally:
        near.close()
        process.kill()
        process.join()
    return Loaded(size, kind.name, f"{span[0]}-{span[1]}", share, held, peak, round(cpu_s, 3))


def _share_bytes(model: TinyModel, kind: GgmlType, span: tuple[int, int]) -> int:
    """Bytes in the file of the matrices of some layers, with the embedding before the first and the head after the
    last one."""
    found = 0
    for name, shape in matrices(model).items():
        layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
        is_end = (name == "token_embd.weight" and span[0] == 0) or (name == "output.weight" and span[1] == model.layers)
        found += kind.num_bytes(shape) * (is_end or span[0] <= layer < span[1])
    return found


def _load(connection: Connection, directory: Path, span: tuple[int, int], num_layers: int) -> None:
    """Runs in the child."""
    from exo_mesh_llamacpp import provider
    from exo_mesh_llamacpp.library import open_library
    from exo_mesh_llamacpp.library_file import packaged_library
    from exo_mesh_llamacpp.stage import LlamaCppStage

    open_library(packaged_library())
    stage = provider.create()
    assert isinstance(stage, LlamaCppStage)
    before, began = _resident_bytes(), time.process_time()
    shard = Shard("bench", *span, num_layers)
    stage.load(LoadRequest(shard, directory, 512, {"threads": "1"}), lambda done, total: None)
    stage.insert(1, 512)
    tensors = {}
    if not shard.is_first:
        width = stage.capabilities.inputs[0].item_shape[0]
        tensors = {HIDDEN: Tensor.from_numpy(np.ones((1, width), np.float32))}
    stage.forward(StageInput((Row(1, 0, 1, 1),), (1,), tensors))
    cpu_s = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    connection.send((_resident_bytes() - before, peak - before, cpu_s))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
