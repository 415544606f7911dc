"""What the child process answers that asks an engine about a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from exo_mesh_dummy import provider
from exo_mesh_dummy.provider import DummyProvider

from exo_mesh.engine.contract import ModelSurvey
from exo_mesh.rings.runner.asking.survey import answer


class _BrokenSurveyor(DummyProvider):
    """An engine whose library fails in its own way."""

    def survey(self, model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
        raise TypeError(f"cannot create a consistent\nmethod resolution order for {model_dir}/config.json")


def test_a_library_that_fails_on_a_model_is_a_refusal_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, code = answer(_BrokenSurveyor(), tmp_path, {})
    assert code == 0 and str(tmp_path) not in str(said)
    assert str(said["unable"]).startswith(
        "engine dummy cannot run the model: its code failed with TypeError: cannot create a consistent method"
    )
    assert "Traceback" in capsys.readouterr().err


def test_an_engine_that_surveys_nothing_is_no_refusal_of_the_model(tmp_path: Path) -> None:
    said, code = answer(provider, tmp_path, {})
    assert code == 1 and "unable" not in said
