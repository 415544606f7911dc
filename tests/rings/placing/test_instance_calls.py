"""An owner learns from the call of a deletion how its instance ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from exo_mesh.domain.plan import Ballot
from exo_mesh.mesh.membership.fences import FENCE_S, Fence
from exo_mesh.rings.placing.calls import answers, delete_instance
from tests.support.neighbours import Neighbours


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_deletion_brings_the_fence_and_whether_the_instance_is_replaced(is_replaced: bool) -> None:
    fences: list[Fence] = []
    deleted: list[tuple[str, bool]] = []

    async def delete_own(instance_id: str, replaced: bool) -> bool:
        deleted.append((instance_id, replaced))
        return True

    membership: Any = SimpleNamespace(take_fence=fences.append)
    owner = Neighbours("a", answers(membership, delete_own, lambda instance_id, idle_s: False))
    fence = Fence("m/1", Ballot(3, "b"), FENCE_S)
    await delete_instance(owner.calls, "a", fence, is_replaced=is_replaced)
    assert fences == [fence] and deleted == [("m/1", is_replaced)]
