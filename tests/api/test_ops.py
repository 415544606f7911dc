"""The routes around inference: models, health, instances, and what every route has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.api.core.streaming import waiting_for
from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.reports import TopologyReport
from exo_mesh.domain.request import Progress
from exo_mesh.domain.whole.served import ServedModel
from exo_mesh.models.entry import ModelEntry
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.api.scripted_mesh import ScriptedMesh, Served, served


async def get(api: Served, path: str, method: str = "GET", **options: Any) -> tuple[int, Any]:
    async with api.http.request(method, path, **options) as reply:
        return reply.status, await reply.json()


async def test_what_the_node_says_of_its_work(api: Served) -> None:
    assert (await get(api, "/queue"))[1]["max"] == 32
    assert (await get(api, "/requests/recent?n=2"))[1] == {"requests": []}
    assert (await get(api, "/requests/stats"))[1] == {"total": 0}
    assert (await get(api, "/memory"))[1]["peers"] is None
    assert (await get(api, "/memory?scope=cluster"))[1]["peers"] == [{}]
    assert (await get(api, "/memory/live"))[1] == [{"pressure_pct": 10.0}]
    for path, param in (("/requests/recent?n=0", "n"), ("/requests/recent?n=x", "n"), ("/memory?scope=all", "scope")):
        status, answer = await get(api, path)
        assert (status, answer["error"]["param"]) == (400, param)


async def test_models_are_listed_as_openai_does(api: Served) -> None:
    api.mesh.names = ("exo-mesh-demo", "org/some-model")
    listed = await api.openai.models.list()
    assert [model.id for model in listed.data] == ["exo-mesh-demo", "org/some-model"]
    model = await api.openai.models.retrieve("org/some-model")
    assert (model.object, model.owned_by) == ("model", "exo-mesh")
    with pytest.raises(openai.NotFoundError) as caught:
        await api.openai.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
    assert (await get(api, "/models"))[1] == (await get(api, "/v1/models?status=downloaded"))[1]
    assert (await get(api, "/v1/models?status=loaded"))[1]["data"] == []
    assert (await get(api, "/v1/models?status=odd"))[1]["error"]["param"] == "status"


async def test_each_status_in_the_list_of_models_can_be_asked_for(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = ServedModel("remote", "openai", "box:80", "r")
    entries = [
        ModelEntry("remote", (), (), 10, (), served=remote),
        ModelEntry("running", ("peer1",), ("m-1",), 10, ()),
        ModelEntry("here", ("peer1",), (), 10, ()),
        ModelEntry("part", ("peer1",), (), 10, (), is_partial=True),
    ]
    monkeypatch.setattr(api.mesh.services.models, "all", lambda: entries)
    listed = {one["id"]: one["status"] for one in (await get(api, "/v1/models"))[1]["data"]}
    assert listed == {"remote": "served", "running": "loaded", "here": "downloaded", "part": "partial"}
    for name, status in listed.items():
        found = [one["id"] for one in (await get(api, f"/v1/models?status={status}"))[1]["data"]]
        assert found == (["remote", "running", "here"] if status == "downloaded" else [name])


@pytest.mark.parametrize(("status", "code"), [("ok", 200), ("degraded", 200), ("starting", 503), ("stopping", 503)])
async def test_health_and_readiness_tell_whether_it_can_serve(api: Served, status: str, code: int) -> None:
    api.mesh.status = status
    for path in ("/health", "/healthcheck"):
        got, health = await get(api, path)
        assert (got, health["status"]) == (code, status)
        assert health["version"]
    got, ready = await get(api, "/readyz")
    assert (got, ready["ready"]) == (code, code == 200)
    if status == "starting":
        assert ready["reasons"][0]["remedy"] == "wait"
    assert await get(api, "/healthz") == (200, {"status": "alive"})


async def test_the_health_keeps_its_fields_in_their_order_and_strangers_get_fewer(model_dir: Path) -> None:
    public = ["status", "level", "reasons", "peers", "mesh"]
    rest = ["runner_mode", "runner_status", "queue", "version"]
    async with served(ScriptedMesh(model_dir), ApiOptions(access=AccessPolicy(needs_key=True))) as api:
        shown = (await get(api, "/health"))[1]
        assert [*shown] == public + rest
        assert [*shown["queue"]] == ["depth", "max", "waiting", "in_progress", "entered"]
    async with served(ScriptedMesh(model_dir), ApiOptions()) as api:
        shown = (await get(api, "/health"))[1]
        assert [*shown] == [*public, "peer_health", "instance_health", *rest, "node_id"]


async def test_instances_are_made_shown_and_deleted(api: Served) -> None:
    status, made = await get(api, "/instance", "POST", json={"model": "m", "min_peers": 2, "policy": "latency"})
    assert (status, made["id"], made["model"]) == (201, "i2", "m")
    assert await get(api, "/instance/i2") == (200, made)
    assert (await get(api, "/state"))[1]["view"]["instances"][-1] == made
    assert (await get(api, "/instance/i2", "DELETE"))[1]["deleted"] is True
    for method in ("GET", "DELETE"):
        status, body = await get(api, "/instance/i2", method)
        assert (status, body["error"]["code"]) == (404, "not_found")
    status, body = await get(api, "/instance", "POST", json={"model": "m", "min_peers": 0})
    assert (status, body["error"]["param"]) == (400, "min_peers")


async def test_replicas_are_made_as_a_list(api: Served) -> None:
    status, made = await get(api, "/instance", "POST", json={"model": "m", "replicas": 3})
    assert status == 201 and [one["id"] for one in made["data"]] == ["i2", "i3", "i4"]
    for wrong in ({"replicas": 0}, {"replicas": 65}):
        status, body = await get(api, "/instance", "POST", json={"model": "m", **wrong})
        assert (status, body["error"]["param"]) == (400, "replicas")
    status, body = await get(api, "/instance", "POST", json={"model": "m", "replicas": 2, "pins": {"a": [0, 4]}})
    assert (status, body["error"]["param"]) == (400, "pins")


async def test_diagnostics_of_one_node_and_of_all(api: Served) -> None:
    assert (await get(api, "/v1/diagnostics/node"))[1]["node_id"] == "peer1"
    for name in ("peer", "alpha"):
        assert (await get(api, f"/v1/diagnostics/cluster/{name}"))[1]["node_id"] == "peer1"
    assert (await get(api, "/v1/diagnostics/cluster/other"))[0] == 404
    assert (await get(api, "/v1/diagnostics/cluster"))[1]["unreachable"] == []
    assert (await get(api, "/v1/diagnostics/cluster/timeline"))[1]["entries"] == []
    assert (await get(api, "/v1/diagnostics/node/quarantine", "DELETE"))[1]["lifted"] == 1


async def test_previews_are_asked_for_and_can_be_sent_back(api: Served) -> None:
    path = "/instance/previews?model=m&context_limit=512&engine=dummy&exclude_peers=a,b"
    status, answer = await get(api, path)
    assert status == 200 and answer["model"] == "m" and answer["previews"][0]["width"] == 1
    assert api.mesh.specs[-1] == InstanceSpec("m", context_limit=512, engine="dummy", exclude_peers=("a", "b"))
    stage = {"peer": "p", "layers": [0, 8], "engine": "dummy", "reserve_bytes": 7, "name": "n", "headroom_bytes": 1}
    status, _ = await get(api, "/instance", "POST", json={"model": "m", "stages": [stage]})
    assert status == 201
    assert api.mesh.specs[-1] == InstanceSpec("m", engine="dummy", pins=(Pin("p", 0, 8, "dummy", 7),))
    stages = [{"peer": "p", "layers": [0, 3], "engine": "mlx"}, {"peer": "q", "layers": [3, 8], "engine": "torch"}]
    status, _ = await get(api, "/instance", "POST", json={"model": "m", "stages": stages})
    assert api.mesh.specs[-1] == InstanceSpec("m", pins=(Pin("p", 0, 3, "mlx"), Pin("q", 3, 8, "torch")))
    status, _ = await get(api, "/instance", "POST", json={"model": "m", "pins": {"alpha": [0, 3], "beta": [3, 8]}})
    assert api.mesh.specs[-1].pins == (Pin("alpha", 0, 3), Pin("beta", 3, 8))


async def test_engines_can_be_preferred_and_mixing_asked_for(api: Served) -> None:
    wish = {"model": "m", "engine_preference": ["torch-cuda", "mlx"], "mixed_rings": "always"}
    status, _ = await get(api, "/instance", "POST", json=wish)
    expected = InstanceSpec("m", engine_preference=("torch-cuda", "mlx"), mixed_rings="always")
    assert status == 201 and api.mesh.specs[-1] == expected
    await get(api, "/instance/previews?model=m&engine_preference=torch-cuda,mlx&mixed_rings=always")
    assert api.mesh.specs[-1] == expected


async def test_tensor_groups_can_be_asked_for_by_size_by_name_and_stage_by_stage(api: Served) -> None:
    await get(api, "/instance", "POST", json={"model": "m", "tensor_group": 2, "group_backend": "ring"})
    assert api.mesh.specs[-1] == InstanceSpec("m", tensor_group=2, group_backend="ring")
    await get(api, "/instance/previews?model=m&tensor_group=2&group_backend=ring")
    assert api.mesh.specs[-1] == InstanceSpec("m", tensor_group=2, group_backend="ring")
    await get(api, "/instance", "POST", json={"model": "m", "groups": [["a", "b"], ["c", "d"]]})
    assert api.mesh.specs[-1] == InstanceSpec("m", groups=(("a", "b"), ("c", "d")))
    await get(api, "/instance/previews?model=m&groups=a,b&groups=c,d")
    assert api.mesh.specs[-1] == InstanceSpec("m", groups=(("a", "b"), ("c", "d")))
    group = {"peers": ["a", "b"], "backend": "jaccl", "rdma": [[None, "rdma_en5"], ["rdma_en4", None]]}
    await get(
        api, "/instance", "POST", json={"model": "m", "stages": [{"peer": "a", "layers": [0, 8], "group": group}]}
    )
    assert api.mesh.specs[-1].pins == (Pin("a", 0, 8, group=("a", "b"), group_backend="jaccl"),)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?model=m&tensor_group=9", "tensor_group"),
        ("?model=m&tensor_group=two", "tensor_group"),
        ("?model=m&tensor_group=2&groups=a,b", "tensor_group"),
        ("?model=m&groups=a", "groups"),
        ("?model=m&group_backend=mpi", "group_backend"),
        ("?model=m&mixed_rings=maybe", "mixed_rings"),
        ("", "model"),
        ("?model=m&context_limit=-1", "context_limit"),
        ("?model=m&widths=2", "widths"),
    ],
)
async def test_odd_previews_are_refused_by_name(api: Served, path: str, param: str) -> None:
    status, body = await get(api, "/instance/previews" + path)
    assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"pins": {"a": [0, 8]}, "policy": "memory"}, "pins"),
        ({"pins": {"a": [0, 8]}, "stages": [{"peer": "a", "layers": [0, 8]}]}, "pins"),
        ({"pins": {}}, "pins"),
        ({"stages": []}, "stages"),
        ({"stages": [{"peer": "a", "layers": [0, 8], "engine": "x"}], "engine": "y"}, "engine"),
        ({"stages": [{"peer": "a", "layers": [0, 8], "colour": "red"}]}, "stages[0].colour"),
        ({"engine": "x", "engine_preference": ["y"]}, "engine_preference"),
        ({"engine": "x", "mixed_rings": "always"}, "mixed_rings"),
        ({"engine_preference": ["y"] * 17}, "engine_preference"),
        ({"mixed_rings": "maybe"}, "mixed_rings"),
        ({"tensor_group": 0}, "tensor_group"),
        ({"tensor_group": 2, "groups": [["a", "b"]]}, "tensor_group"),
        ({"pins": {"a": [0, 8]}, "tensor_group": 2}, "tensor_group"),
        ({"groups": [["a"]]}, "groups"),
        ({"group_backend": "mpi"}, "group_backend"),
        ({"pins": {"a": [0]}}, "pins[...]"),
    ],
)
async def test_wishes_that_contradict_each_other_are_refused(api: Served, body: dict[str, Any], param: str) -> None:
    status, answer = await get(api, "/instance", "POST", json={"model": "m", **body})
    assert (status, answer["error"]["param"]) == (400, param)


async def test_topology_version_and_the_front_page(api: Served) -> None:
    assert (await get(api, "/v1/topology"))[1] == (await get(api, "/topology"))[1]
    topology = api.mesh.services.observation.topology()
    assert msgspec.convert((await get(api, "/topology"))[1], TopologyReport) == topology
    assert (await get(api, "/version"))[1]["version"]
    _, index = await get(api, "/")
    assert index["next"].startswith(f"curl {api.url}/v1/chat/completions")
    assert "/v1/chat/completions" in index["routes"]


async def test_metrics_are_those_of_the_registry(mesh: ScriptedMesh) -> None:
    registry = CollectorRegistry()
    Counter("exo_mesh_things", "Things.", registry=registry).inc(3)
    async with served(mesh, ApiOptions(lambda: registry)) as api, api.http.get("/metrics") as reply:
        assert reply.headers["Content-Type"].startswith("text/plain")
        families = {family.name: family for family in text_string_to_metric_families(await reply.text())}
    assert families["exo_mesh_things"].samples[0].value == 3


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/cancel/nobody", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/%ff%00", 404, "model_not_found"),
        ("GET", "/v1/models/%ed%a0%80", 404, "model_not_found"),
        ("GET", "/instance/%ff", 404, "not_found"),
    ],
)
async def test_wrong_paths_and_methods_have_openais_shape(
    api: Served, method: str, path: str, status: int, code: str
) -> None:
    got, body = await get(api, path, method)
    assert (got, body["error"]["code"]) == (status, code)
    assert body["error"].keys() == {"message", "type", "param", "code"}


async def test_a_wrong_method_says_which_are_right(api: Served) -> None:
    async with api.http.get("/v1/chat/completions") as reply:
        assert reply.headers["Allow"] == "POST"


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-123", True), ("", False), ("x" * 129, False), ("with space", False), ("ü", False)]
)
async def test_every_reply_has_a_request_id(api: Served, given: str, kept: bool) -> None:
    for path in ("/healthz", "/v1/nothing"):
        async with api.http.get(path, headers={"x-request-id": given}) as reply:
            assert (reply.headers["x-request-id"] == given) == kept
            assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (None, "keep-alive"),
        (Progress("recovering"), "recovering"),
        (Progress("queued", 3, 7), "queued 3 of 7"),
        (Progress("queued", 3, 7, 12.3), "queued 3 of 7, about 12 s"),
        (Progress("queued", 3, 7, 0.2), "queued 3 of 7, about 1 s"),
        (Progress("queued", 30, 32, 200), "queued 30 of 32, about 3 min"),
        (Progress("loading", 3, 8), "loading 3/8"),
        (Progress("fetching", 1_200_000_000, 9_600_000_000), "fetching 12 % of 9.60 GB"),
        (Progress("prefill", 2, 5), "prefill 40 %"),
    ],
)
def test_what_a_waiting_stream_says(progress: Progress | None, text: str) -> None:
    assert waiting_for(progress) == text
