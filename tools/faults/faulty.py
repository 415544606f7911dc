"""An engine that fails on request, around an engine that works. Only meshes of the harness load it (see `install`).

All options are optional. `inner` (numpy) is the engine that works, and gets every other option. `hang_at=N`,
`exit_at=N`: at the N-th forward of a process. `hang_in_load=1`, `exit_in_load=1`. `once=FILE`: only if FILE does not
exist; FILE is then created. `noise=X`: activations are off by up to X. `prefill_ms=X`: the time of each token in a row
of several. `stubborn=1`: SIGTERM is ignored.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import (
    ANY_POSITION,
    Availability,
    Capabilities,
    LoadProgress,
    LoadRequest,
    StageEngine,
    StageInput,
    StageOutput,
)
from exo_mesh.engine.registry import load_registry

NAME = "faulty"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of this engine; see the module's docstring."""

    inner: str = "numpy"
    hang_at: int = 0
    exit_at: int = 0
    hang_in_load: int = 0
    exit_in_load: int = 0
    once: str = ""
    noise: float = 0.0
    prefill_ms: float = 0.0
    stubborn: int = 0


def parse(options: dict[str, str]) -> tuple[Plan, dict[str, str]]:
    """Splits options into this engine's and the inner engine's."""
    kinds = {name: type(getattr(Plan(), name)) for name in Plan.__slots__}
    ours: dict[str, Any] = {name: kinds[name](text) for name, text in options.items() if name in kinds}
    return Plan(**ours), {name: text for name, text in options.items() if name not in kinds}


class FaultyStage:
    """The inner engine's stage, with the failures that the options request."""

    def __init__(self) -> None:
        self._plan = Plan()
        self._inner: StageEngine | None = None
        self._num_forwards = 0
        self._rng = np.random.default_rng(os.getpid())
        self.capabilities = Capabilities(ragged=True, rollback=ANY_POSITION, dtypes=("float32",))

    def load(self, request: LoadRequest, progress: LoadProgress) -> None:
        self._plan, others = parse(dict(request.options))
        if self._plan.stubborn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._strike(self._plan.hang_in_load, self._plan.exit_in_load)
        self._inner = load_registry().provider(self._plan.inner).create()
        self._inner.load(replace(request, options=others), progress)
        self.capabilities = replace(self._inner.capabilities, row_exact=not self._plan.noise)

    def forward(self, stage_input: StageInput) -> StageOutput:
        self._num_forwards += 1
        plan = self._plan
        self._strike(self._num_forwards == plan.hang_at, self._num_forwards == plan.exit_at)
        if plan.prefill_ms:
            time.sleep(sum(row.n for row in stage_input.rows if row.n > 1) * plan.prefill_ms / 1000)
        output = self._works().forward(stage_input)
        if not plan.noise:
            return output
        off = {name: self._off(tensor) for name, tensor in output.tensors.items()}
        return StageOutput(off, output.logits, output.faults)

    def insert(self, sequence: int, max_tokens: int) -> None:
        self._works().insert(sequence, max_tokens)

    def remove(self, sequence: int) -> None:
        self._works().remove(sequence)

    def sequences(self) -> Sequence[int]:
        return self._works().sequences()

    def memory_bytes(self) -> int:
        return self._works().memory_bytes()

    def close(self) -> None:
        self._works().close()

    def _works(self) -> StageEngine:
        assert self._inner is not None, "load first"
        return self._inner

    def _off(self, tensor: Tensor) -> Tensor:
        values = tensor.numpy()
        return Tensor.from_numpy(
            values + self._rng.uniform(-1, 1, values.shape).astype(values.dtype) * self._plan.noise
        )

    def _strike(self, hang: object, leave: object) -> None:
        if not (hang or leave) or (self._plan.once and Path(self._plan.once).exists()):
            return
        if self._plan.once:
            Path(self._plan.once).touch()
        if leave:
            os._exit(70)
        while True:  # like a device that never returns
            time.sleep(3600)


class FaultyProvider:
    name = NAME
    kind: Literal["stage", "whole-model"] = "stage"

    def availability(self) -> Availability:
        return Availability(True, "fails as its options say", preference=-1, dtypes=("float32",))

    def supports(self, architecture: str) -> bool:
        return True

    def version(self) -> str:
        return "1"

    def create(self) -> StageEngine:
        return FaultyStage()


provider = FaultyProvider()


def install(site: Path) -> str:
    """Creates a directory by which, on PYTHONPATH, a process finds this engine; returns that PYTHONPATH."""
    info = site / "exo_mesh_faulty-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: exo-mesh-faulty\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[exo_mesh.engines]\n{NAME} = tools.faults.faulty:provider\n")
    before = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(path for path in (str(site), before, str(ROOT), str(ROOT / "engines")) if path)
