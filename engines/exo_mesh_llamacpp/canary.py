"""Tries a library with a tiny random model before its first use: it must compute the same in parts as whole.

The code of an architecture can change with a release of llama.cpp, and most mistakes of a stage would be silent. A
process tries each library, architecture and device once, which takes 0.1 to 0.3 s on the CPU.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import LoadRequest, StageInput
from exo_mesh.errors import EngineError, MeshError
from exo_mesh_llamacpp.canary_models import known, write_tiny
from exo_mesh_llamacpp.devices import BackendDevice, chosen_gpus
from exo_mesh_llamacpp.gguf_source import GgufModel
from exo_mesh_llamacpp.library import Library
from exo_mesh_llamacpp.loading import load_stage
from exo_mesh_llamacpp.options import parse_device
from exo_mesh_llamacpp.plan import ModelSource
from exo_mesh_llamacpp.stage import LlamaCppStage
from exo_mesh_llamacpp.whole import load_whole

FILE = "canary.gguf"
CONTEXT = 64
PROMPT = 9
STEPS = 3
UNSTEADY = 0.01
"""Largest difference of logits, relative to their spread, on a GPU that does not give equal bits for equal work.
Mistakes give differences of 0.1 and more."""

_verdicts: dict[tuple[str, str, str], str] = {}
"""By library, architecture and device."""


def require(
    library: Library, source: ModelSource, options: Mapping[str, str], gpus: Sequence[BackendDevice] = ()
) -> None:
    """Raises EngineError if the library does not compute the architecture of a model in parts as it does whole: on the
    CPU, and on each of the GPUs alone. options: of the stage."""
    arch = str(source.metadata(0, source.num_layers)["general.architecture"])
    for device in ("cpu", *(gpu.name for gpu in gpus)):
        key = (library.fingerprint, arch, device)
        if key not in _verdicts:
            _verdicts[key] = defect(library, arch, {**options, "device": device})
        if _verdicts[key]:
            where, hint = ("", "") if device == "cpu" else (f" on {device}", "; use --engine-option device=cpu")
            raise EngineError(f"{library.build} is not used for {arch}{where}: {_verdicts[key]}{hint}")


def defect(library: Library, arch: str, options: Mapping[str, str]) -> str:
    """The reason why an architecture cannot be used with a library on the device that the options name, or ""."""
    if arch not in known():
        return "no tiny model of it is known"
    given = {"threads": "1"} | {name: value for name, value in options.items() if name in ("library", "device")}
    with tempfile.TemporaryDirectory(prefix="exo-mesh-canary-") as scratch:
        directory = Path(scratch)
        write_tiny(arch, directory / FILE)
        try:
            return _difference(library, directory, given)
        except MeshError as exc:
            return f"a tiny model of it fails: {exc}"


def _difference(library: Library, directory: Path, options: Mapping[str, str]) -> str:
    source = GgufModel(directory, FILE)
    count, cuts = source.num_layers, source.legal_cuts
    gpus = chosen_gpus(library.devices(), parse_device(options))
    stops = cuts[len(cuts) // 2 : len(cuts) // 2 + 1]

    def whole() -> np.ndarray:
        stage = LlamaCppStage(lambda request, _: load_whole(directory / FILE, request, stops if gpus else ()))
        return _logits([stage], (), count, directory, options)

    want = whole()
    stages = [LlamaCppStage(partial(load_stage, open_model=lambda *_: source)) for _ in range(2 if cuts else 1)]
    got = _logits(stages, stops, count, directory, options)
    if not np.isfinite(want).all() or not want.std() > 0:
        return "a tiny model of it gives no numbers"
    worst = float(np.abs(got - want).max() / want.std())
    if worst and not (worst <= UNSTEADY and gpus and not np.array_equal(whole(), want)):
        return f"a tiny model of it in {len(stages)} parts differs by {worst:.1e} from the whole one"
    return ""


def _logits(
    stages: Sequence[LlamaCppStage], cuts: Sequence[int], count: int, directory: Path, options: Mapping[str, str]
) -> np.ndarray:
    """A prompt, and steps of two sequences; all logits. Closes the stages."""
    try:
        for stage, (start, stop) in zip(stages, itertools.pairwise((0, *cuts, count)), strict=True):
            request = LoadRequest(Shard("canary", start, stop, count), directory, CONTEXT, options)
            stage.load(request, lambda done, total: None)
            for sequence in (0, 1):
                stage.insert(sequence, CONTEXT)
        frames: list[tuple[Row, ...]] = [(Row(sequence, 0, PROMPT, PROMPT),) for sequence in (0, 1)]
        frames += [(Row(0, pos0, 1, 1), Row(1, pos0, 1, 1)) for pos0 in range(PROMPT, PROMPT + STEPS)]
        return np.concatenate([_passed(stages, rows) for rows in frames])
    finally:
        for stage in stages:
            stage.close()


def _passed(stages: Sequence[LlamaCppStage], rows: tuple[Row, ...]) -> np.ndarray:
    tokens = tuple(
        1 + (17 * row.sequence + 5 * position) % 30 for row in rows for position in range(row.pos0, row.pos0 + row.n)
    )
    tensors: dict[str, Tensor] = {}
    logits = None
    for stage in stages:
        output = stage.forward(StageInput(rows, tokens, tensors))
        if output.faults:
            raise EngineError(output.faults[0].message)
        tensors, logits = dict(output.tensors), output.logits
    assert logits is not None, "the last stage gives logits"
    return logits
