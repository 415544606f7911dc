"""Checks that loading reports its progress, and names the fault of a model that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.conformance.stages import CONTEXT, CutModel, nobody
from exo_mesh.engine.conformance.subject import Damage, Subject
from exo_mesh.engine.contract import EngineProvider, LoadRequest
from exo_mesh.errors import InputError, MeshError, ModelError

__all__ = [
    "test_a_shard_of_another_model_is_refused",
    "test_a_spoilt_model_is_refused_by_name",
    "test_an_option_that_it_does_not_have_is_refused",
    "test_progress_rises_to_the_total",
]


def test_progress_rises_to_the_total(model: CutModel) -> None:
    seen: list[tuple[int, int]] = []
    model.stage(0, model.num_layers, progress=lambda done, total: seen.append((done, total))).close()
    done, totals = zip(*seen, strict=True)
    assert len(set(totals)) == 1 and totals[0] > 0
    assert list(done) == sorted(done)
    assert done[0] >= 0 and done[-1] == totals[0]


def test_a_spoilt_model_is_refused_by_name(
    subject: Subject, engine_provider: EngineProvider, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for index, damage in enumerate(subject.damages):
        with subtests.test(damage.name):
            _refused(subject, engine_provider, tmp_path / f"spoilt-{index}", damage)


def _refused(subject: Subject, provider: EngineProvider, directory: Path, damage: Damage) -> None:
    model = CutModel(subject, subject.write_model(directory))
    damage.spoil(directory)
    with pytest.raises(ModelError) as caught:
        provider.create().load(model.request(0, model.num_layers), nobody)
    missing = [word for word in (directory.name, *damage.says) if word not in str(caught.value)]
    assert not missing, f"{caught.value} does not say {missing}"


def test_a_shard_of_another_model_is_refused(
    subject: Subject, engine_provider: EngineProvider, model: CutModel
) -> None:
    if not subject.reads_weights:
        pytest.skip("the engine reads no weights and accepts any number of layers")
    shard = Shard("subject", 0, 1, model.num_layers + 1)
    with pytest.raises(MeshError, match=rf"\b{model.num_layers}\b"):
        engine_provider.create().load(LoadRequest(shard, model.directory, CONTEXT, subject.options), nobody)


def test_an_option_that_it_does_not_have_is_refused(
    subject: Subject, engine_provider: EngineProvider, model: CutModel
) -> None:
    options = {**subject.options, "no_such_option": "1"}
    request = LoadRequest(Shard("subject", 0, model.num_layers, model.num_layers), model.directory, CONTEXT, options)
    with pytest.raises(InputError, match="no_such_option"):
        engine_provider.create().load(request, nobody)
