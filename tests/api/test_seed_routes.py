"""Routes under the names that older programs know."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.scripted_mesh import Served


async def call(api: Served, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with api.http.request(method, path, json=body) as reply:
        return reply.status, await reply.json()


async def test_a_model_is_placed_as_exo_asks_for_it(api: Served) -> None:
    body = {"model_id": "exo-mesh-demo", "min_nodes": 2, "excluded_nodes": ["beta"]}
    status, made = await call(api, "POST", "/place_instance", body)
    assert status == 201 and made["model"] == "exo-mesh-demo"
    spec = api.mesh.specs[-1]
    assert (spec.min_peers, spec.exclude_peers, spec.tensor_group) == (2, ("beta",), None)
    await call(api, "POST", "/place_instance", {**body, "sharding": "Tensor", "instance_meta": "MlxJaccl"})
    assert (api.mesh.specs[-1].tensor_group, api.mesh.specs[-1].group_backend) == (2, "jaccl")


async def test_a_placement_is_told_and_not_made(api: Served) -> None:
    before = len(api.mesh.instances)
    status, plan = await call(
        api, "GET", "/instance/placement?model_id=exo-mesh-demo&min_nodes=2&sharding=Pipeline&excluded_nodes=a,b"
    )
    assert status == 200 and plan["request"] == {"model": "exo-mesh-demo"}
    assert api.mesh.specs[-1].exclude_peers == ("a", "b") and api.mesh.specs[-1].min_peers == 2
    assert (await call(api, "GET", "/instance/previews?model_id=exo-mesh-demo"))[0] == 200
    assert len(api.mesh.instances) == before


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "/place_instance", {}, "model_id"),
        ("POST", "/place_instance", {"model_id": "exo-mesh-demo", "min_nodes": 0}, "min_nodes"),
        ("POST", "/place_instance", {"model_id": "exo-mesh-demo", "min_nodes": 1, "sharding": "Tensor"}, "min_nodes"),
        ("GET", "/instance/placement", None, "model_id"),
        ("GET", "/instance/placement?model_id=a&min_nodes=x", None, "min_nodes"),
        ("GET", "/instance/placement?model_id=a&color=x", None, "color"),
        ("POST", "/model/load", {"model": "a", "model_id": "b"}, "model"),
    ],
)
async def test_what_cannot_be_used_is_named(api: Served, method: str, path: str, body: Any, param: str) -> None:
    status, said = await call(api, method, path, body)
    assert (status, said["error"]["param"]) == (400, param), said


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/place_instance", {"model_id": "absent"}),
        ("POST", "/place_instance", {"model_id": "/absent"}),
        ("GET", "/instance/placement?model_id=absent", None),
        ("GET", "/instance/previews?model_id=absent", None),
    ],
)
async def test_an_unknown_model_is_refused_under_the_name_that_the_client_used(
    api: Served, method: str, path: str, body: Any
) -> None:
    status, said = await call(api, method, path, body)
    assert (status, said["error"]["param"]) == (404, "model_id"), said
    assert (await call(api, "GET", "/instance/previews?model=absent"))[1]["error"]["param"] == "model"


async def test_models_are_loaded_unloaded_and_collected(api: Served) -> None:
    assert (await call(api, "POST", "/model/load", {"model": "exo-mesh-demo"}))[1]["id"] == "i2"
    assert (await call(api, "POST", "/model/unload"))[1]["instances"] == ["i1", "i2"]
    assert (await call(api, "POST", "/model/unload", {"model_id": "exo-mesh-demo"}))[0] == 404
    assert (await call(api, "POST", "/model/unload"))[0] == 400
    await call(api, "POST", "/model/load")
    assert (await call(api, "POST", "/model/gc"))[1]["instances"] == ["i1"]


async def test_a_node_says_who_it_is(api: Served) -> None:
    assert (await call(api, "GET", "/node_id"))[1] == "peer1"
    assert (await call(api, "GET", "/node/identity"))[1]["node_id"] == "peer1"
    health = (await call(api, "GET", "/health"))[1]
    assert (health["node_id"], health["runner_mode"], health["queue"]["depth"]) == ("peer1", "subprocess", 0)
