"""Two real nodes with one secret."""

from __future__ import annotations

from pathlib import Path

from exo_mesh.security.secret import new_secret
from tests.node.meshes import a_request, instances, mesh, tokens


async def test_two_peers_with_one_secret_form_a_ring_and_answer(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, secret=new_secret(), min_peers=2) as nodes:
        assert len(await tokens(nodes[0], a_request(max_tokens=12))) == 12
        (instance,) = instances(nodes[1])
        assert len(instance["stages"]) == 2
        assert nodes[0].health()["mesh"] == "closed"
