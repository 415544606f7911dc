"""Settings of the mesh on real nodes: what one is told, all do, also after all have been restarted."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.local_mesh import local_mesh
from exo_mesh.cli.main import main
from exo_mesh.mesh.membership.setting_sharing import FILE_NAME
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import mesh, until

MODEL = "exo-mesh-demo"


@pytest.mark.extended
async def test_placement_follows_at_every_peer_and_after_a_restart_of_all(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        before = await nodes[1].instances.preview(InstanceSpec(MODEL))
        await nodes[0].shared.change({"min_peers": "2"})
        await until(lambda: nodes[1].shared.effective.now.min_peers == 2)
        after = await nodes[1].instances.preview(InstanceSpec(MODEL))
        assert (len(before["stages"]), len(after["stages"])) == (1, 2)
        await until((tmp_path / "n1" / FILE_NAME).is_file)
    async with mesh(tmp_path, 2) as nodes:
        assert [node.shared.effective.now.min_peers for node in nodes] == [2, 2]
        await nodes[1].shared.change({"min_peers": None})
        await until(lambda: nodes[0].shared.effective.now.min_peers == 1)


@pytest.mark.extended
def test_what_one_node_is_told_the_other_does(capsys: pytest.CaptureFixture[str]) -> None:
    with local_mesh(2, ["--engine", "dummy", "--open-admin"], "settings", api_port=0) as nodes:
        nodes.wait_until_joined()
        second = nodes.client(1)
        said = ["trace_sample=1", "max_generate_tokens=3", f"default_model={MODEL}"]
        assert main(["config", "mesh", *said, "--api-url", nodes.api_urls[0], "--json"]) == exit_codes.OK
        assert json.loads(capsys.readouterr().out) == dict(one.split("=") for one in said)
        end = time.monotonic() + 10
        while len(second.get("/config")["mesh"]) < len(said) and time.monotonic() < end:
            pass
        answer = second.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, 60.0)
        assert answer["usage"]["completion_tokens"] == 3
        assert len(second.get("/v1/traces")["data"]) == 1
        taken_back = [one.partition("=")[0] + "=" for one in said]
        assert main(["config", "mesh", *taken_back, "--api-url", nodes.api_urls[1]]) == exit_codes.OK
        assert "each node uses its own" in capsys.readouterr().out
        assert main(["config", "mesh", "api_port=1", "--api-url", nodes.api_urls[1]]) == exit_codes.FAILED
        assert "api_port is a setting of each node" in capsys.readouterr().err
