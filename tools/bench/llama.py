"""A stage of the llama.cpp engine beside llama.cpp itself: `python -m tools.bench against-llama`.

Both run the same random Llama with the same types and one thread, each in a process of its own, in turns. llama.cpp
takes token ids and computes with llama_decode; the engine is called as a runner calls it. The figures are the smallest
of all turns, in CPU time and in wall time: of a decode step of some rows, and of a prompt.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from exo_mesh.cli.bench.engines import count, parse_size
from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageEngine
from exo_mesh.errors import EngineError
from exo_mesh.weights.random_checkpoint import model_of_size, write_checkpoint
from tools.stages import forward, insert, remove

DEPTH = 64
"""Positions that each sequence holds before a decode step."""
STEPS = 4
"""Decode steps of a turn."""
CONTEXT = 2048
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Cell:
    """One cell of the table, in milliseconds: ours and llama.cpp's."""

    model: str
    quant: str
    work: str
    cpu_ms: float
    llama_cpu_ms: float
    wall_ms: float
    llama_wall_ms: float

    @property
    def ratio(self) -> float:
        return self.cpu_ms / self.llama_cpu_ms


class _Side(Protocol):
    """Something that computes a random Llama."""

    def begin(self, rows: int) -> None:
        """Bring `rows` sequences to DEPTH positions."""

    def step(self, rows: int, pos0: int) -> None:
        """A decode step of all of them."""

    def prompt(self, tokens: Sequence[int]) -> None:
        """A prompt of one new sequence."""


class _Ours:
    """Stages of the engine, one after the other."""

    def __init__(self, model_dir: Path, num_layers: int, options: Mapping[str, str], num_stages: int) -> None:
        from exo_mesh_llamacpp import provider

        bounds = [num_layers * index // num_stages for index in range(num_stages + 1)]
        self._stages: list[StageEngine] = []
        for start, stop in itertools.pairwise(bounds):
            stage = provider.create()
            shard = Shard("bench", start, stop, num_layers)
            stage.load(LoadRequest(shard, model_dir, CONTEXT, options), lambda done, total: None)
            self._stages.append(stage)

    def begin(self, rows: int) -> None:
        remove(self._stages, range(100))
        insert(self._stages, range(rows), CONTEXT)
        for sequence in range(rows):
            forward(self._stages, (Row(sequence, 0, DEPTH, 0),), range(1, DEPTH + 1))

    def step(self, rows: int, pos0: int) -> None:
        frame = tuple(Row(sequence, pos0, 1, 1) for sequence in range(rows))
        forward(self._stages, frame, range(1, rows + 1)).argmax(1)

    def prompt(self, tokens: Sequence[int]) -> None:
        remove(self._stages, (99,))
        insert(self._stages, (99,), CONTEXT)
        for begin in range(0, len(tokens), 512):
            part = tokens[begin : begin + 512]
            forward(self._stages, (Row(99, begin, len(part), int(begin + len(part) == len(tokens))),), part)


class _Theirs:
    """llama.cpp with token ids."""

    def __init__(self, model_dir: Path, options: Mapping[str, str]) -> None:
        from exo_mesh_llamacpp.library import open_library
        from exo_mesh_llamacpp.library_file import chosen_library
        from exo_mesh_llamacpp.options import parse_options
        from exo_mesh_llamacpp.source import open_source
        from exo_mesh_llamacpp.whole import PlainModel

        library = open_library(chosen_library(options))
        parsed = parse_options(options)
        self._model = PlainModel(library, open_source(model_dir, parsed, lambda: library), parsed)
        self._context = self._model.context(1, CONTEXT)

    def begin(self, rows: int) -> None:
        self._context.free()
        self._context = self._model.context(rows, 512)
        for sequence in range(rows):
            self._decode(range(1, DEPTH + 1), range(DEPTH), [sequence] * DEPTH, last=False)

    def step(self, rows: int, pos0: int) -> None:
        for sequence in range(rows):
            self._context.cut(sequence, pos0)
        logits = self._decode(range(1, rows + 1), [pos0] * rows, range(rows), last=False, every=True)
        assert logits is not None
        logits.argmax(1)

    def prompt(self, tokens: Sequence[int]) -> None:
        if self._context.cells < CONTEXT:
            self._context.free()
            self._context = self._model.context(1, CONTEXT)
        self._context.cut(0, 0)
        step = self._context.max_tokens
        for begin in range(0, len(tokens), step):
            part = tokens[begin : begin + step]
            self._decode(part, range(begin, begin + len(part)), [0] * len(part), last=begin + len(part) == len(tokens))

    def _decode(
        self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int], *, last: bool, every: bool = False
    ) -> np.ndarray | None:
        amount = len(ids)
        self._model.tokens[:amount] = ids
        self._context.positions[:amount] = positions
        self._context.sequences[:amount] = slots
        self._context.wanted[:amount] = every
        self._context.wanted[amount - 1] = last or every
        return self._context.decode(amount)


def add_parser(subparsers: Any) -> None:
    """Adds the benchmark."""
    parser = subparsers.add_parser("against-llama", help="a llama.cpp stage beside llama.cpp", description=__doc__)
    parser.add_argument("--sizes", default="200M,1100M", metavar="A,B", help="weights of the random Llamas")
    parser.add_argument("--quants", default="bf16,q8_0,q4_0", metavar="A,B")
    parser.add_argument("--rows", default="1,4,8,16", metavar="A,B", help="rows of a decode step")
    parser.add_argument("--prompts", default="128,1024", metavar="A,B", help="tokens of a prompt")
    parser.add_argument("--turns", type=count(1000), default=10, metavar="N")
    parser.add_argument("--stages", type=count(16), default=1, metavar="N", help="stages of the engine, in one process")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the table."""
    from exo_mesh_llamacpp import provider

    if not (look := provider.availability()).available:
        raise EngineError(f"{look.reason} ({look.remedy})")
    cells: list[Cell] = []
    for size in args.sizes.split(","):
        with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as scratch:
            model = model_of_size(parse_size(size))
            directory = write_checkpoint(Path(scratch) / "model", model, repeat=True)
            for quant in args.quants.split(","):
                options = {"quant": quant, "threads": "1"}
                for cell in _cells(size, quant, directory, model.layers, options, args):
                    cells.append(cell)
                    if not args.json:
                        print(_text(cell), flush=True)
    if args.json:
        print(json.dumps([asdict(cell) | {"ratio": round(cell.ratio, 3)} for cell in cells]))
    return 0


def _text(cell: Cell) -> str:
    return (
        f"{cell.model:6s} {cell.quant:5s} {cell.work:12s} CPU {cell.cpu_ms:9.2f} ms, llama.cpp "
        f"{cell.llama_cpu_ms:9.2f}, {cell.ratio:.3f} x; wall {cell.wall_ms:9.2f}, {cell.llama_wall_ms:9.2f}"
    )


def _cells(
    size: str, quant: str, directory: Path, num_layers: int, options: Mapping[str, str], args: argparse.Namespace
) -> Iterator[Cell]:
    given = (("rows", args.rows), ("prompt", args.prompts))
    works = [(kind, int(amount)) for kind, amounts in given for amount in amounts.split(",")]
    ours = _started("ours", directory, num_layers, options, args.stages)
    theirs = _started("theirs", directory, num_layers, options, args.stages)
    with ours as one, theirs as other:
        for kind, amount in works:
            best = [[float("inf")] * 2, [float("inf")] * 2]
            for _ in range(args.turns):
                for side, found in zip((one, other), best, strict=True):
                    taken = _ask(side, (kind, amount))
                    found[:] = [min(was, now) for was, now in zip(found, taken, strict=True)]
            (cpu, wall), (llama_cpu, llama_wall) = ([1000 * seconds for seconds in found] for found in best)
            yield Cell(size, quant, f"{kind} {amount}", cpu, llama_cpu, wall, llama_wall)


@contextmanager
def _started(
    side: str, directory: Path, num_layers: int, options: Mapping[str, str], num_stages: int
) -> Iterator[Connection]:
    """A child process that has loaded the model; ended afterwards."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    child = context.Process(target=_serve, args=(far, side, directory, num_layers, dict(options), num_stages))
    child.start()
    far.close()
    try:
        _ask(near, None)
        yield near
    finally:
        near.close()
        child.join(10)
        if child.is_alive():
            child.kill()


def _ask(connection: Connection, work: tuple[str, int] | None) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of one piece of work. Raises EngineError if the child ends or is late."""
    if work is not None:
        connection.send(work)
    try:
        if not connection.poll(DEADLINE_S):
            raise EngineError(f"no answer in {DEADLINE_S:.0f} s")
        answer: tuple[float, float] = connection.recv()
    except EOFError as exc:
        raise EngineError("a measuring process ended; its message is above") from exc
    return answer


def _serve(
    connection: Connection, side: str, directory: Path, num_layers: int, options: dict[str, str], num_stages: int
) -> None:
    """Runs in the child: loads, and does each piece of work that it is sent."""
    loaded: _Side = _Ours(directory, num_layers, options, num_stages) if side == "ours" else _Theirs(directory, options)
    connection.send((0.0, 0.0))
    while True:
        try:
            kind, amount = connection.recv()
        except EOFError:
            return
        connection.send(_measured(loaded, kind, amount))


def _measured(side: _Side, kind: str, amount: int) -> tuple[float, float]:
    if kind == "prompt":
        tokens = [1 + index % 1000 for index in range(amount)]
        return _timed(lambda: side.prompt(tokens))
    side.begin(amount)
    steps = [_timed(lambda pos0=pos0: side.step(amount, pos0)) for pos0 in range(DEPTH, DEPTH + STEPS)]  # type: ignore[misc]
    return min(cpu for cpu, _ in steps), min(wall for _, wall in steps)


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall
