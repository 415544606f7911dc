"""Power and energy over real nodes: from counters in files and a tool's lines to /state, /metrics and `bench serve`.

The files and the tool are stand-ins for hardware that test machines lack; everything that reads them is what runs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.bench.energy import read_energy
from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from exo_mesh.cli.main import main
from tests.support.processes import eventually
from tests.support.recorded import RECORDED, machine_that_draws

WATTS = 40.0

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def sysfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with machine_that_draws(tmp_path_factory.mktemp("sys"), WATTS) as root:
        yield root


@pytest.fixture(scope="module")
def mesh(sysfs: Path) -> Iterator[LocalMesh]:
    flags = ["--engine", "dummy", "--engine-option", "cost_ms=10", "--sysfs", str(sysfs)]
    with local_mesh(2, flags, "energy", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client().post("/instance", {"model": "exo-mesh-demo", "min_peers": 2}, 60.0)
        yield mesh


def test_every_node_knows_what_all_machines_draw_and_who_said_so(mesh: LocalMesh) -> None:
    def hardware() -> list[dict[str, dict[str, object]]]:
        return [reading["hardware"] for reading in mesh.client(1).get("/state")["telemetry"].values()]

    def sources() -> list[object]:
        return [one["machine"]["sources"].get("power_w") for one in hardware()]  # type: ignore[attr-defined]

    assert eventually(lambda: sources() == ["rapl", "rapl"], 20), "from the second reading of a counter on"
    for one in hardware():
        assert one["machine"]["power_w"] == pytest.approx(WATTS, rel=0.25)
        assert one["machine"]["energy_j"] > 0  # type: ignore[operator]
        (gpu,) = one["accelerators"]
        assert (gpu["id"], gpu["vendor"], gpu["power_w"]) == ("gpu0", "amd", 41.0)  # type: ignore[index]


def test_the_benchmark_says_what_a_token_costs(mesh: LocalMesh, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--url", mesh.api_urls[1], "--model", "exo-mesh-demo", "--streams", "4", "--requests", "8"]
    assert main(["bench", "serve", *argv, "--prompt", "32", "--tokens", "64", "--json"]) == exit_codes.OK
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    energy = run["energy"]
    most = WATTS * (run["wall_s"] + 2 * 2.0)  # windows of 2 s at both ends
    assert 0 < energy["joules"] <= 1.25 * most, "and not the double of it, for both nodes read the same counter"
    assert energy["joules_per_output_token"] * 8 * 64 <= energy["joules"]
    assert energy["joules_per_prompt"] > 0 and energy["joules_per_prompt_token"] > 0
    totals = read_energy(mesh.client(index).text("/metrics") for index in range(2))
    assert totals.tokens["output"] >= 8 * 64 - 8 and totals.prompts >= 8


def test_a_tool_is_asked_while_the_node_lives_and_no_longer(tmp_path: Path) -> None:
    """`mactop` is a script that prints a recorded sample each 0.1 s; SIGKILL gives the node no chance to end it."""
    tool = tmp_path / "mactop"
    samples = RECORDED / "mactop.jsonl"
    tool.write_text(f'#!/bin/sh\necho $$ > "$0.pid"\nwhile cat {samples}; do sleep 0.1; done\n')
    tool.chmod(0o755)
    with local_mesh(1, ["--engine", "dummy", "--power-tool", str(tool)], "mactop", api_port=0) as mesh:
        mesh.wait_until_joined()

        def told() -> dict[str, dict[str, object]]:
            (reading,) = mesh.client().get("/state")["telemetry"].values()
            return dict(reading["hardware"])

        assert eventually(lambda: "power_w" in told()["machine"], 20)
        assert told()["machine"]["power_w"] == 43.0
        (gpu,) = told()["accelerators"]
        assert gpu["name"] == "Apple M2 Max" and gpu["utilization"] == 0.965  # type: ignore[index]
        text = mesh.client().text("/metrics")
        assert 'exo_mesh_accelerator_power_watts{accelerator="gpu0"} 22.5' in text
        assert 'exo_mesh_power_part_watts{part="machine",source="mactop"} 43.0' in text
        if promtool := shutil.which("promtool"):
            argv = [promtool, "check", "metrics"]
            checked = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
            assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
        pid = int(Path(f"{tool}.pid").read_text())
        os.kill(mesh.children[0].pid, signal.SIGKILL)
        assert eventually(lambda: not Path(f"/proc/{pid}").exists()), "its pipe is broken"
