"""Models that are placed at the start of a node, and that leave when nobody uses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_mesh.instances import instances as instances_module
from exo_mesh.instances.idle import IdleClock
from exo_mesh.instances.spec import InstanceSpec
from tests.support.nodes import MODEL, a_request, instances, mesh, runners, tokens, until


def test_an_instance_is_idle_from_its_last_token_on() -> None:
    idle = IdleClock(10.0)
    assert idle.due({"m-1": (0, 5)}, 0.0) == []
    assert idle.due({"m-1": (1, 5)}, 9.0) == [], "a request waits or runs"
    assert idle.due({"m-1": (0, 5)}, 18.0) == []
    assert idle.due({"m-1": (0, 9)}, 18.5) == [], "one has come and gone between two looks"
    assert idle.due({"m-1": (0, 9)}, 28.4) == []
    assert idle.due({"m-1": (0, 9), "n-1": (0, 0)}, 28.6) == ["m-1"]
    assert idle.due({"m-1": (0, 9)}, 28.7) == [], "told once"
    assert IdleClock(0.0).due({"m-1": (0, 0)}, 1e9) == [], "never"


@pytest.mark.extended
async def test_an_idle_model_is_unloaded_and_the_next_request_loads_it_again(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, idle_unload=1) as nodes:
        await nodes[0].create_instance(InstanceSpec(MODEL, min_peers=2))
        assert len(await tokens(nodes[1], a_request())) == 12
        await until(lambda: not runners() and not any(map(instances, nodes)), 8)
        assert len(await tokens(nodes[1], a_request("again"))) == 12


@pytest.mark.extended
async def test_all_peers_that_preload_a_model_place_it_once_and_a_deletion_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances_module, "PRELOAD_SETTLE_S", 0.5)
    async with mesh(tmp_path, 2, preload=(MODEL, "nobody-has-this")) as nodes:
        await until(lambda: all([one["state"] for one in instances(node)] == ["ready"] for node in nodes))
        assert await nodes[1].delete_instance(instances(nodes[1])[0]["id"])
        with pytest.raises(TimeoutError):
            await until(runners, 2)
