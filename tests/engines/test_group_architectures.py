"""Every architecture that mlx-lm can split gives, as a group of two ranks, the logits of one process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mlx_lm")

from exo_mesh_mlx.provider import groupable

from tools.tensor_groups.__main__ import check_all
from tools.tensor_groups.table import TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NOT_HERE = {"muse_spark"}
"""Their kernels are for Metal only."""


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Of two processes that go through those that this run has chosen."""
    here = [item for item in request.session.items if item.parent is request.node]
    chosen = [item.callspec.params["architecture"] for item in here if isinstance(item, pytest.Function)]
    return {answer["architecture"]: answer for answer in check_all(chosen, 2)}


@pytest.mark.parametrize("architecture", sorted(set(groupable()) - NOT_HERE))
def test_logits_are_those_of_one_process(answers: dict[str, dict[str, Any]], architecture: str) -> None:
    answer = answers[architecture]
    assert answer.get("difference", 1.0) <= TOLERANCE, answer
    assert 0 < answer["canary"] < TOLERANCE
    assert answer["split"] * 2 == answer["full"] > 0
