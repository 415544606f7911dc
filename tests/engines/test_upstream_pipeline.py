"""mlx-lm's own pipeline is what docs/how-it-works/principles.md says: an even split, with the last layers on rank 0."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pipeline = pytest.importorskip("mlx_lm.models.pipeline")


@dataclass
class Group:
    """One rank of a group, as mlx.core.distributed has it."""

    number: int
    members: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.members


def layers_of(rank: int, size: int, num_layers: int) -> list[int]:
    class Model(pipeline.PipelineMixin):  # type: ignore[misc]
        layers: list[int | None]

    model = Model()
    model.layers = list(range(num_layers))
    model.pipeline(Group(rank, size))
    return list(model.pipeline_layers)


def test_the_split_of_mlx_lm_is_even_and_in_reverse_rank_order() -> None:
    assert [layers_of(rank, 2, 8) for rank in range(2)] == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert [len(layers_of(rank, 3, 8)) for rank in range(3)] == [3, 3, 2]
