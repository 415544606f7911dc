"""Tiny random GGUF models of the llama.cpp library's architectures, and what the library alone computes with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from exo_mesh_llamacpp.gguf_rules import RULES, ArchRules
from exo_mesh_llamacpp.gguf_source import GgufModel
from exo_mesh_llamacpp.library import open_library
from exo_mesh_llamacpp.library_file import packaged_library
from exo_mesh_llamacpp.loading import load_stage
from exo_mesh_llamacpp.stage import LlamaCppStage
from exo_mesh_llamacpp.whole import load_whole
from msgspec.structs import replace

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import EngineProvider, LoadRequest, StageEngine
from exo_mesh.errors import MeshError, ModelError
from tools.architectures.llamacpp_configs import ARCHITECTURES, LAYERS, ON_DEMAND, REASONS, metadata_of
from tools.architectures.llamacpp_shapes import FILE, ShapesError, ask_shapes, write_model
from tools.architectures.outcome import Outcome
from tools.architectures.trials import computed
from tools.stages import CONTEXT, Stages

OPTIONS = {"threads": "1"}
TOLERANCE = 0.0
MOST_TRIPLES = 1
RUNS_ALL = False
CRASHED = "absent"
"""A failed assertion of the library ends the process."""


def names() -> list[str]:
    return list(ARCHITECTURES)


def refusal(name: str) -> str:
    return ""


def variant(outcome: Outcome) -> str:
    """The library wants experts in some architectures, and in others not: they are tried second."""
    return "" if outcome.state != "absent" or " " in outcome.name else f"{outcome.name} experts"


def verdict(outcome: Outcome) -> None:
    """What is not exact without rules of its own is refused."""
    if outcome.name not in RULES and outcome.state not in ("exact", "whole"):
        outcome.state = "refused" if outcome.state == "failed" else outcome.state
        outcome.reason = REASONS.get(outcome.name, outcome.reason)
    outcome.reason = _NOISE.sub("", outcome.reason).strip("; ")


def write(directory: Path, name: str) -> int:
    library = open_library(packaged_library())
    arch, _, experts = name.partition(" ")
    try:
        asked = ask_shapes(library, metadata_of(arch, bool(experts)), ON_DEMAND)
        write_model(library, asked, directory)
    except ShapesError as exc:
        raise ModelError(str(exc)) from exc
    return LAYERS


def _whole(directory: Path) -> LlamaCppStage:
    stage = LlamaCppStage(lambda request, _: load_whole(directory / FILE, request))
    stage.load(LoadRequest(Shard("tiny", 0, LAYERS, LAYERS), directory, CONTEXT, OPTIONS), lambda done, total: None)
    return stage


def reference(directory: Path) -> dict[str, np.ndarray]:
    """The library computes the same frames: how many rows a product has can change its last bit."""
    whole = _whole(directory)
    parts = ("alone", "together", "restored short", "copied", *(["cut back"] * whole.capabilities.cuts_anywhere))
    try:
        return {part: computed([whole], part) for part in parts}
    finally:
        whole.close()


def survey(directory: Path, name: str) -> tuple[tuple[int, ...], str]:
    return GgufModel(directory, FILE, _rules(directory, name.partition(" ")[0])).legal_cuts, ""


def _rules(directory: Path, arch: str) -> ArchRules:
    """The rules of an architecture; of an unknown one, those that the library's reasons ask for."""
    rules = RULES.get(arch, ArchRules())
    if arch in RULES:
        return rules
    whole = _whole(directory)
    rules = replace(rules, recurrent=whole._loaded().recurrent)
    whole.close()
    stages = _Stages(directory, rules)
    try:
        stages.ring(GgufModel(directory, FILE, rules).legal_cuts[:1])
    except (MeshError, RuntimeError) as exc:
        return replace(rules, own_head="'output.weight' not found" in str(exc))
    finally:
        stages.close()
    return rules


class _Provider:
    """Makes stages of the written file, also of an architecture that the engine refuses."""

    def __init__(self, rules: ArchRules) -> None:
        self._rules = rules

    def create(self) -> LlamaCppStage:
        return LlamaCppStage(partial(load_stage, open_model=lambda place, *_: GgufModel(place, FILE, self._rules)))


class _Stages(Stages):
    """Stages that are new in each ring: the cells of a stage that was used before lie in another order."""

    def __init__(self, directory: Path, rules: ArchRules) -> None:
        super().__init__(cast(EngineProvider, _Provider(rules)), directory, LAYERS, **OPTIONS)

    def ring(self, cuts: Sequence[int]) -> list[StageEngine]:
        self.close()
        ring = super().ring(cuts)
        for stage in ring:
            assert isinstance(stage, LlamaCppStage)
            pools = stage._loaded().pools
            if pools.sharing:
                pools.sharing = replace(pools.sharing, least=8)
        return ring


def stages(directory: Path, outcome: Outcome) -> Stages:
    return _Stages(directory, _rules(directory, outcome.name.partition(" ")[0]))


def conclude(directory: Path, outcome: Outcome, stages: Stages, want: Mapping[str, np.ndarray]) -> None:
    arch = outcome.name.partition(" ")[0]
    rules = _rules(directory, arch)
    source = GgufModel(directory, FILE, rules)
    outcome.traits = {"kv": "recurrent" if source.recurrent else "window" if source.windowed else "full"}
    if rules != RULES.get(arch):
        outcome.traits["rules"] = repr(rules)


_NOISE = re.compile(r"load: adding \d+ dummy tokens; |llama_model_load\w*: |error loading model: |failed to load model")
