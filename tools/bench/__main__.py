"""Benchmarks for developers of exo-mesh.

python -m tools.bench at-once               how soon nodes that start together on busy cores are one mesh
python -m tools.bench group                 a tensor group whose ranks all run here: correctness, costs, stress
python -m tools.bench busy                  speed of an engine beside other programs, by number of threads
python -m tools.bench collectives           all-reduce and send between ranks, by size; with mlx.launch over cables
python -m tools.bench copy                  copies between peers: speed beside plain TCP, what streams notice
    "at_once", "busy", "collectives", "copying", "drafts", "early_kill", "entry", "first_minute", "first_token",
    "grammar", "group", "idle", "lap", "llama", "llama_load", "llama_ring", "mlx_server", "page", "predictions",
    "prefix", "quantised", "real_model", "router", "sampling", "shared", "start", "templates", "vectors",
python -m tools.bench entry                 tokens per second through one entry peer, beside those of another checkout
python -m tools.bench first-minute          from nothing to the first answer: seconds and megabytes of each step
python -m tools.bench first-token           from an empty disk to the first token, beside snapshot_download and mlx_lm
python -m tools.bench grammar               what grammars cost a ring and save it, by tokens per second
python -m tools.bench idle                  memory, CPU and wake-ups of nodes that have nothing to do
python -m tools.bench lap                   CPU time of the Python of a lap, by stage
python -m tools.bench page                  work of a browser for each frame of a growing answer
python -m tools.bench predictions           what previews predict, beside what a client then gets
python -m tools.bench prefix                what the prefix cache saves and costs, by time to the first token
python -m tools.bench quantised             memory and speed of quantised weights that the torch engine keeps
python -m tools.bench real-model            a real model beside the servers of llama.cpp and mlx-lm, and its quality
python -m tools.bench router                time to first token over instances of different speed, beside an oracle
python -m tools.bench sampling              time to draw the tokens of a frame, by vocabulary
python -m tools.bench shared                memory and speed of streams over one prompt, and the time of a lookup
python -m tools.bench start                 CPU time and memory of a start, beside the code of another checkout
python -m tools.bench templates             time to render a chat template in a child process, beside a thread
python -m tools.bench vectors               how fast a mesh makes vectors of texts, and what a stream notices
python -m tools.bench against-llama         a stage of the llama.cpp engine beside llama.cpp itself
python -m tools.bench llama-load            memory and CPU time until a llama.cpp stage is ready, from a GGUF file
python -m tools.bench llama-ring            two llama.cpp stages on a core each beside llama.cpp, and beside its RPC
python -m tools.bench against-mlx-server    what exo-mesh bench serve does, beside mlx_lm.server with the same load
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from exo_mesh.base.telemetry.logs import setup_logging
from exo_mesh.cli.parser import Parser
from exo_mesh.errors import MeshError

BENCHES = (
    "at_once", "busy", "collectives", "copying", "drafts", "early_kill", "entry", "first_minute", "first_token",
    "grammar", "group", "idle", "lap", "llama", "llama_load", "llama_ring", "mlx_server", "page", "predictions",
    "prefix", "quantised", "real_model", "router", "sampling", "shared", "start", "templates", "vectors",
)  # fmt: skip
"""The modules of this package that are benchmarks."""


def main(argv: Sequence[str]) -> int:
    """Runs the named benchmark; returns the exit code."""
    setup_logging(level="error")
    parser = Parser(prog="python -m tools.bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for name in BENCHES:
        importlib.import_module(f"tools.bench.{name}").add_parser(subparsers)
    try:
        args = parser.parse_all(argv)
        run: Callable[..., int] = args.run
        return run(args)
    except MeshError as exc:
        print(f"tools.bench: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
