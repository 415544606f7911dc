"""Engines are found through entry points; a bad plugin is reported and harms nobody."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Literal

import pytest

from exo_mesh.engine.contract import Availability, ChecksOptions, StageEngine
from exo_mesh.engine.registry import GROUP, Registry, load_registry
from exo_mesh.errors import EngineError, InputError


@dataclass
class FakeProvider:
    name: str
    look: Availability
    kind: Literal["stage", "whole-model"] = "stage"

    def availability(self) -> Availability:
        return self.look

    def supports(self, architecture: str) -> bool:
        return True

    def version(self) -> str:
        return ""

    def create(self) -> StageEngine:
        raise NotImplementedError


def registry(*found: FakeProvider, **broken: str) -> Registry:
    return Registry({item.name: item for item in found}, broken)


FAST = FakeProvider("fast", Availability(True, "a GPU", preference=50))
SLOW = FakeProvider("slow", Availability(True, "a CPU", preference=5))
ABSENT = FakeProvider("absent", Availability(False, "torch is not installed", "pip install torch", preference=99))
TOY = FakeProvider("toy", Availability(True, "computes nothing", preference=-1))


def test_our_engines_come_through_entry_points() -> None:
    points = [EntryPoint(name, f"exo_mesh_{name}:provider", GROUP) for name in ("mlx", "dummy")]
    assert set(load_registry(points).providers) == {"mlx", "dummy"}


def test_a_plugin_that_does_not_import_is_reported() -> None:
    points = [
        EntryPoint("gone", "no_such_package_here:provider", GROUP),
        EntryPoint("dummy", "exo_mesh_dummy:provider", GROUP),
        EntryPoint("hollow", "exo_mesh_dummy:no_such_name", GROUP),
    ]
    found = load_registry(points)
    assert set(found.providers) == {"dummy"}
    assert "ModuleNotFoundError" in found.broken["gone"]
    assert "AttributeError" in found.broken["hollow"]
    with pytest.raises(EngineError, match="gone is installed but does not import"):
        found.provider("gone")


@pytest.mark.parametrize(("there", "chosen"), [((SLOW, FAST, ABSENT, TOY), "fast"), ((TOY, SLOW), "slow")])
def test_auto_takes_the_preferred_available_engine(there: Any, chosen: str) -> None:
    assert registry(*there).choose().name == chosen


def test_an_engine_of_negative_preference_runs_only_by_its_name() -> None:
    assert registry(TOY).choose("toy") is TOY
    with pytest.raises(EngineError, match="no engine can run here"):
        registry(TOY).choose("auto")


def test_errors_say_what_there_is_and_what_would_help() -> None:
    with pytest.raises(InputError, match='no engine "mlx"; installed: fast, slow'):
        registry(SLOW, FAST).choose("mlx")
    with pytest.raises(EngineError, match=r"torch is not installed \(pip install torch\)"):
        registry(ABSENT).choose("absent")
    with pytest.raises(EngineError, match=r"absent: torch is not installed.*odd: does not import: boom"):
        registry(ABSENT, odd="boom").choose()


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("llamacpp", {"kv": "q8_0"}, "kv=q8_0 needs flash=on"),
        ("llamacpp", {"nope": "1"}, "has no option .*it has quant, kv"),
        ("numpy", {"mode": "odd"}, "it may be fast or deterministic"),
        ("torch", {"dtype": "int3"}, "supported: float32"),
        ("torch", {"threads": "0"}, "1 to 1024"),
        ("torch", {"packed": "yes"}, "supported: on, off"),
        ("torch", {"quantised": "maybe"}, 'quantised="maybe"'),
        ("mlx", {"nope": "1"}, "nope"),
        ("dummy", {"cost_ms": "-1"}, "out of range"),
    ],
)
def test_engine_options_are_refused_before_a_model_is_loaded(
    engine: str, options: dict[str, str], message: str
) -> None:
    provider = load_registry([EntryPoint(engine, f"exo_mesh_{engine}:provider", GROUP)]).provider(engine)
    assert isinstance(provider, ChecksOptions)
    with pytest.raises(InputError, match=message):
        provider.check_options(options)
    provider.check_options({})
