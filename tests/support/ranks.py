"""The ranks of a tensor group as processes that load a stage and run frames, without runners or nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exo_mesh.cli.bench.local_ring import free_endpoints
from exo_mesh.domain.tensor_group import RankWiring

PROGRAM = Path(__file__).with_name("rank_program.py")

DEADLINE_S = 300.0
"""For all ranks of a job. They spin while they wait for each other, so a busy machine makes them slow."""


def wirings(size: int) -> list[RankWiring]:
    endpoints = free_endpoints(size)
    return [RankWiring("ring", rank, endpoints) for rank in range(size)]


@dataclass
class Job:
    """What every rank does: load layers of a model, maybe check the group, then run frames and write what comes out.

    frames: per frame rows `(sequence, pos0, n, num_logits)` and token ids. spoil: see rank_program.py.
    """

    model_dir: Path
    layers: tuple[int, int, int]
    frames: list[tuple[list[tuple[int, int, int, int]], list[int]]] = field(default_factory=list)
    verify_chunk: int = 0
    context: int = 512
    spoil: str = ""
    copies: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By the frame that they come before: (source, sequence, positions)."""


@dataclass
class Outcome:
    """answer: the last line that a rank printed, from JSON; {"error": [class, message]} for a MeshError."""

    returncode: int
    answer: dict[str, Any]
    stderr: str


def run_ranks(job: Job, folder: Path, size: int = 2) -> list[Outcome]:
    """Run the job on `size` ranks; results of frames are `folder/RANK.npz` with `logits0`, `hidden0`, …"""
    processes = []
    for wiring in wirings(size):
        told = {
            "model_dir": str(job.model_dir), "layers": job.layers, "frames": job.frames, "context": job.context,
            "verify_chunk": job.verify_chunk, "spoil": job.spoil, "copies": job.copies,
            "out": str(folder / f"{wiring.rank}.npz"),
            "rank": wiring.rank, "endpoints": wiring.endpoints,
        }  # fmt: skip
        processes.append(
            subprocess.Popen(
                ["nice", "-n", "5", sys.executable, str(PROGRAM), json.dumps(told)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ,
            )
        )
    outcomes = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=DEADLINE_S)
            lines = out.strip().splitlines()
            outcomes.append(Outcome(process.returncode, json.loads(lines[-1]) if lines else {}, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
    return outcomes
