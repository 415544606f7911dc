"""Compares the stages of a random model with the library's own run of the whole file, bit by bit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from exo_mesh_llamacpp.gguf_rules import RULES, ArchRules
from exo_mesh_llamacpp.gguf_source import GgufModel
from exo_mesh_llamacpp.library import Library, open_library
from exo_mesh_llamacpp.library_file import packaged_library
from exo_mesh_llamacpp.loading import load_stage
from exo_mesh_llamacpp.options import LlamaCppOptions
from exo_mesh_llamacpp.stage import LlamaCppStage
from exo_mesh_llamacpp.whole import load_whole

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageEngine
from exo_mesh.errors import MeshError
from tools.llamacpp_architectures.configs import ON_DEMAND, VOCAB, metadata_of
from tools.llamacpp_architectures.random_model import FILE, write_model
from tools.llamacpp_architectures.shapes import ShapesError, ask_shapes
from tools.stages import forward, insert

CONTEXT = 256
TOKENS = np.random.default_rng(9).integers(0, VOCAB, (3, 128))
OPTIONS = {"threads": "1"}


@dataclass
class Outcome:
    """The result for one architecture. state: exact, whole (cannot be cut), refused, absent (the library runs no tiny
    model) or failed. cuts: those tried, different: those with other bits."""

    arch: str
    state: str
    reason: str = ""
    layers: int = 0
    cuts: list[int] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    kv: str = ""
    rules: str = ""

    def json(self) -> str:
        return json.dumps(asdict(self))


def check(arch: str, *, experts: bool, rules: ArchRules | None = None, few: bool = False) -> Outcome:
    """Try an architecture in this process, which a failed assertion of the library ends. few: not every cut."""
    library = open_library(packaged_library())
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        try:
            asked = ask_shapes(library, metadata_of(arch, experts), ON_DEMAND)
            write_model(library, asked, directory)
        except ShapesError as exc:
            return Outcome(arch, "absent", str(exc)[-300:])
        return _with_rules(library, arch, directory, rules or RULES.get(arch, ArchRules()), few)


def _with_rules(library: Library, arch: str, directory: Path, rules: ArchRules, few: bool) -> Outcome:
    """Compare, and again with another rule if the library's reason asks for it."""
    try:
        outcome = _compare(library, arch, directory, rules, few)
    except (MeshError, RuntimeError) as exc:
        if "'output.weight' not found" in str(exc) and not rules.own_head:
            return _with_rules(library, arch, directory, replace(rules, own_head=True), few)
        outcome = Outcome(arch, "failed", str(exc)[-300:])
    outcome.rules = outcome.rules or repr(rules)
    return outcome


def _compare(library: Library, arch: str, directory: Path, rules: ArchRules, few: bool) -> Outcome:
    if _has_states(library, directory) and not rules.recurrent:
        return _with_rules(library, arch, directory, replace(rules, recurrent=True), few)
    source = GgufModel(directory, FILE, rules)
    count = source.num_layers
    whole = LlamaCppStage(lambda request, _: load_whole(directory / FILE, request))
    whole.load(_request(directory, 0, count, count), lambda done, total: None)
    rolls_back = whole.capabilities.rollback == "any"
    want = run([whole], rolls_back)
    outcome = Outcome(arch, "exact", layers=count, cuts=list(source.legal_cuts))
    outcome.kv = "recurrent" if source.recurrent else "window" if source.windowed else "full"
    if not np.isfinite(want).all() or not want.std() > 0.01:
        return Outcome(arch, "absent", f"the tiny model's logits say nothing (std {want.std():.2g})")
    cuts = source.legal_cuts
    splits: list[tuple[int, ...]] = [(), *((cut,) for cut in (cuts[:: max(1, len(cuts) // 2)] if few else cuts))]
    if len(cuts) > 1:
        splits.append((cuts[0], cuts[-1]))
    for split in splits:
        got = run(_ring(directory, count, split, rules), rolls_back)
        if not np.array_equal(got, want):
            worst = float(np.abs(got - want).max() / want.std())
            outcome.different.append(f"{split}: {worst:.1e}")
    if outcome.different:
        outcome.state = "failed"
    elif not cuts:
        outcome.state = "whole"
    return outcome


def run(stages: Sequence[StageEngine], rolls_back: bool) -> np.ndarray:
    """Prompts in chunks, alone and together, decode steps, a rollback, a saved sequence and a copy; all logits. Closes
    the stages."""
    insert(stages, (0, 1), CONTEXT)
    got = [
        _step(stages, Row(0, 0, 20, 20)),
        _step(stages, Row(0, 20, 7, 2), Row(1, 0, 7, 2)),
        *(_step(stages, Row(0, 27 + i, 1, 1), Row(1, 7 + i, 1, 1)) for i in range(3)),
    ]
    if rolls_back:
        got += [_step(stages, Row(0, 18, 3, 3)), _step(stages, Row(0, 21, 1, 1), Row(1, 10, 1, 1))]
    else:
        got += [_step(stages, Row(0, 30, 1, 1), Row(1, 10, 1, 1))]
    for stage in stages:
        assert isinstance(stage, LlamaCppStage)
        saved = stage.save(1)
        stage.restore(2, CONTEXT, saved)
        pools = stage._loaded().pools
        if pools.sharing:  # the stage with the whole file does not share
            pools.sharing = replace(pools.sharing, least=8)
        stage.copy(1, 3, 11, CONTEXT)
    got += [forward(stages, (Row(number, 11, 1, 1),), TOKENS[1, 11:12]) for number in (2, 3)]
    for stage in stages:
        stage.close()
    return np.concatenate(got)


def _step(stages: Sequence[StageEngine], *rows: Row) -> np.ndarray:
    ids = np.concatenate([TOKENS[row.sequence, row.pos0 : row.pos0 + row.n] for row in rows])
    return forward(stages, rows, ids)


def _request(directory: Path, start: int, stop: int, count: int) -> LoadRequest:
    return LoadRequest(Shard("tiny", start, stop, count), directory, CONTEXT, OPTIONS)


def _ring(directory: Path, count: int, cuts: Sequence[int], rules: ArchRules) -> list[StageEngine]:
    def opened(place: Path, _options: LlamaCppOptions, _library: Callable[[], Library]) -> GgufModel:
        return GgufModel(place, FILE, rules)

    stages: list[StageEngine] = []
    for start, stop in zip((0, *cuts), (*cuts, count), strict=True):
        stage = LlamaCppStage(partial(load_stage, open_model=lambda place, _, library: GgufModel(place, FILE, rules)))
        stage.load(_request(directory, start, stop, count), lambda done, total: None)
        stages.append(stage)
    return stages


def _has_states(library: Library, directory: Path) -> bool:
    """Whether the library says that some layers keep a state of constant size."""
    call = library.call
    handle = call.llama_model_load_from_file(str(directory / FILE).encode(), call.llama_model_default_params())
    try:
        return bool(call.llama_model_is_hybrid(handle) or call.llama_model_is_recurrent(handle))
    finally:
        call.llama_model_free(handle)
