"""Draining any peer, and reading its log."""

from __future__ import annotations

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from tests.api.scripted_mesh import ScriptedMesh, served


async def test_a_peer_is_drained_by_its_name_and_takes_requests_again(mesh: ScriptedMesh) -> None:
    async with served(mesh, ApiOptions(access=AccessPolicy(open_admin=True))) as api:
        async with api.http.post("/admin/drain?node_id=alpha") as reply:
            assert await reply.json() == {"draining": True, "node_id": "peer1"} and mesh.draining
        async with api.http.delete("/admin/drain") as reply:
            assert await reply.json() == {"draining": False, "node_id": "peer1"} and not mesh.draining
        async with api.http.post("/admin/drain?node_id=nobody") as reply:
            assert reply.status == 404 and "nobody" in (await reply.json())["error"]["message"]


async def test_the_log_is_for_admins_and_as_long_as_asked(mesh: ScriptedMesh) -> None:
    async with served(mesh, ApiOptions(access=AccessPolicy(open_admin=True))) as api:
        async with api.http.get("/admin/log?node_id=alpha&n=2") as reply:
            assert [line["message"] for line in (await reply.json())["data"]] == ["line 1", "line 2"]
        async with api.http.get("/admin/log?node_id=nobody") as reply:
            assert reply.status == 404
    async with served(mesh, ApiOptions()) as api, api.http.get("/admin/log") as reply:
        assert reply.status == 403, "an open mesh shows no log to strangers"


@pytest.mark.parametrize("n", ["0", "501", "x", "-1", ""])
async def test_a_number_of_records_out_of_range_is_refused(mesh: ScriptedMesh, n: str) -> None:
    async with (
        served(mesh, ApiOptions(access=AccessPolicy(open_admin=True))) as api,
        api.http.get(f"/admin/log?n={n}") as reply,
    ):
        assert reply.status == 400 and (await reply.json())["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/admin/drain?node_id={}"),
        ("GET", "/admin/log?node_id={}"),
        ("POST", "/admin/stop?node_id={}"),
        ("POST", "/admin/wake?node_id={}"),
        ("GET", "/v1/diagnostics/cluster/{}"),
        ("POST", "/v1/diagnostics/cluster/{}/capture"),
        ("DELETE", "/download/{}/m"),
    ],
)
async def test_every_route_says_which_peers_there_are(mesh: ScriptedMesh, method: str, path: str) -> None:
    async with served(mesh, ApiOptions(access=AccessPolicy(open_admin=True))) as api:
        for text in ("nobody", "pee"):
            async with api.http.request(method, path.format(text)) as reply:
                error = (await reply.json())["error"]
                assert (reply.status, error["code"]) == (404, "not_found")
                assert error["message"].startswith(f'no peer is called "{text}"; known peers: "')
        if "wake" not in path and "download" not in path:
            for text in ("alpha", "peer1", "n123"):
                async with api.http.request(method, path.format(text)) as reply:
                    assert reply.status < 300
