"""Models that are placed at the start of a node, and that leave when nobody uses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from exo_mesh.rings.placing import preloading
from exo_mesh.rings.placing.idle import IdleClock
from exo_mesh.rings.placing.spec import InstanceSpec
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


def test_a_client_may_wish_for_another_time() -> None:
    idle = IdleClock(10.0)
    work = {"m-1": (0, 5), "n-1": (0, 5), "o-1": (0, 5)}
    assert idle.due(work, 0.0) == []
    idle.wish("m-1", -1.0)
    idle.wish("n-1", 0.0)
    assert idle.due(work, 0.1) == ["n-1"], "at once, but not at the first look"
    assert idle.due({name: work[name] for name in ("m-1", "o-1")}, 10.0) == ["o-1"]
    idle.wish("m-1", 30.0)
    assert idle.due({"m-1": (0, 5)}, 29.9) == []
    assert idle.due({"m-1": (0, 5)}, 30.0) == ["m-1"], "the last wish counts"
    assert idle.due({"m-1": (0, 5)}, 31.0) == [], "placed again"
    assert idle.due({"m-1": (0, 5)}, 40.9) == [], "and it has the time of the mesh again"
    assert idle.due({"m-1": (0, 5)}, 41.0) == ["m-1"]
    idle = IdleClock(0.0)
    idle.wish("m-1", 2.0)
    assert idle.due({"m-1": (0, 5), "n-1": (0, 5)}, 0.0) == []
    assert idle.due({"m-1": (0, 5), "n-1": (0, 5)}, 1e9) == ["m-1"], "others stay for ever"


def test_the_time_that_is_left_counts_from_the_last_use() -> None:
    idle = IdleClock(10.0)
    assert idle.left_s("m-1", 0.0) == 10.0, "not seen yet"
    idle.due({"m-1": (0, 5)}, 0.0)
    assert idle.left_s("m-1", 4.0) == 6.0
    idle.due({"m-1": (0, 6)}, 5.0)
    assert (idle.left_s("m-1", 5.0), idle.left_s("m-1", 99.0)) == (10.0, 0.0)
    idle.wish("m-1", 60.0)
    assert idle.left_s("m-1", 6.0) == 59.0
    idle.wish("m-1", -1.0)
    assert idle.left_s("m-1", 6.0) is None and IdleClock(0.0).left_s("m-1", 6.0) is None


@pytest.mark.extended
async def test_a_request_says_how_long_its_model_stays_whoever_owns_it(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        for node, name in zip(nodes[::-1], ("not the owner", "the owner"), strict=True):
            assert len(await tokens(node, replace(a_request(name), keep_alive_s=0.0))) == 12
            await until(lambda: not runners() and not any(map(instances, nodes)), 8)
            assert len(await tokens(nodes[0], a_request(f"again after {name}"))) == 12


@pytest.mark.extended
async def test_an_idle_model_is_unloaded_and_the_next_request_loads_it_again(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, idle_unload=1) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        assert len(await tokens(nodes[1], a_request())) == 12
        await until(lambda: not runners() and not any(map(instances, nodes)), 8)
        assert len(await tokens(nodes[1], a_request("again"))) == 12


@pytest.mark.extended
async def test_all_peers_that_preload_a_model_place_it_once_and_a_deletion_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preloading, "PRELOAD_SETTLE_S", 0.5)
    async with mesh(tmp_path, 2, preload=(MODEL, "nobody-has-this")) as nodes:
        await until(lambda: all([one.state for one in instances(node)] == ["ready"] for node in nodes))
        assert await nodes[1].instances.delete(instances(nodes[1])[0].id)
        with pytest.raises(TimeoutError):
            await until(runners, 2)
