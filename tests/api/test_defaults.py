"""What the operator of a node wants for requests that say nothing of it."""

from __future__ import annotations

from exo_mesh.api.context import ApiOptions, RequestDefaults
from tests.api.scripted_mesh import ScriptedMesh, served

OWN = {"messages": [{"role": "system", "content": "Sing."}, {"role": "user", "content": "Hi"}]}


async def test_requests_get_what_they_leave_open(mesh: ScriptedMesh) -> None:
    async with served(mesh, ApiOptions(defaults=lambda: RequestDefaults(0.25, "Be brief.", 7))) as api:
        await api.chat()
        assert (mesh.request.sampling.temperature, mesh.request.max_tokens) == (0.25, 7)
        assert "Be brief." in mesh.text.decode(mesh.request.prompt_ids)
        async with api.http.post("/apply-template", json={"messages": [{"role": "user", "content": "Hi"}]}) as reply:
            assert "Be brief." in (await reply.json())["prompt"]


async def test_what_a_request_says_is_stronger(mesh: ScriptedMesh) -> None:
    async with served(mesh, ApiOptions(defaults=lambda: RequestDefaults(0.25, "Be brief.", 7))) as api:
        await api.chat(**OWN, temperature=0.5, max_tokens=9)
        assert (mesh.request.sampling.temperature, mesh.request.max_tokens) == (0.5, 9)
        assert "Be brief." not in mesh.text.decode(mesh.request.prompt_ids)
        await api.chat(max_tokens=-1)
        assert mesh.request.max_tokens == mesh.limit - len(mesh.request.prompt_ids)
        await api.http.post("/v1/completions", json={"prompt": "Hi"})
        assert (mesh.request.sampling.temperature, mesh.request.max_tokens) == (0.25, 16)
