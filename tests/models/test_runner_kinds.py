"""Which program serves a model, by the tasks on its card."""

from __future__ import annotations

from typing import get_args

import pytest

from exo_mesh.errors import InputError
from exo_mesh.models.cards.runner_kinds import RUNNERS, runner_of
from exo_mesh.models.cards.toml_card import Task


def test_each_task_of_a_card_is_in_the_table() -> None:
    assert set(RUNNERS) == set(get_args(Task))


def test_a_model_is_served_by_the_first_task_that_can_be() -> None:
    assert runner_of("m", ("image_generation", "text_generation")) == "exo_mesh.rings.runner"


@pytest.mark.parametrize("tasks", [("image_generation",), ()])
def test_a_model_for_other_tasks_is_refused_by_name(tasks: tuple[Task, ...]) -> None:
    with pytest.raises(InputError, match=r"^org/m is for ") as refused:
        runner_of("org/m", tasks)
    assert refused.value.param == "model"
