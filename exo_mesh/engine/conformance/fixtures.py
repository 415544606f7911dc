"""Fixtures of the suite; a test module must define the fixture `subject`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from exo_mesh.engine.conformance.stages import CutModel, Stages, assert_close
from exo_mesh.engine.conformance.subject import Subject
from exo_mesh.engine.contract import EngineProvider

__all__ = ["alike", "engine_provider", "loaded_stages", "model", "same_work", "stages"]

Alike = Callable[[np.ndarray, np.ndarray], None]


@pytest.fixture(scope="module")
def engine_provider(subject: Subject) -> EngineProvider:
    """The engine's provider; the tests are skipped with its reason if it cannot run here."""
    provider = subject.load_provider()
    look = provider.availability()
    if not look.available:
        pytest.skip(f"{provider.name} cannot run here: {look.reason} ({look.remedy})")
    return provider


@pytest.fixture(scope="module")
def model(subject: Subject, engine_provider: EngineProvider, tmp_path_factory: pytest.TempPathFactory) -> CutModel:
    return CutModel(subject, subject.write_model(tmp_path_factory.mktemp("subject")))


@pytest.fixture(scope="module")
def loaded_stages(model: CutModel) -> Iterator[Stages]:
    """Two stages (one, if the model cannot be cut), loaded once for all tests."""
    with model.cut(model.middle) as stages:
        yield stages


@pytest.fixture
def stages(loaded_stages: Stages) -> Iterator[Stages]:
    """The loaded stages, without any sequence before and after."""
    loaded_stages.clear()
    yield loaded_stages
    loaded_stages.clear()


@pytest.fixture
def alike(loaded_stages: Stages) -> Alike:
    """Compares results from different frames or chunks: equal bits if every stage declares row_exact."""
    exact = all(engine.capabilities.row_exact for engine in loaded_stages.engines)
    tolerance = 0.0 if exact else loaded_stages.model.subject.tolerance
    return lambda got, want: assert_close(got, want, tolerance)


@pytest.fixture
def same_work(subject: Subject) -> Alike:
    """Compares the results of different engine objects for the same calls."""
    return lambda got, want: assert_close(got, want, subject.slice_tolerance)
