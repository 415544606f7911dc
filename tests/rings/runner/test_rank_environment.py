"""What our rank processes are given is what MLX's own launcher would give them, and MLX forms the group with it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli.bench.local_ring import free_endpoints
from exo_mesh.domain.tensor_group import GroupBackend, RankWiring, RdmaMatrix
from exo_mesh.errors import EngineError
from exo_mesh.rings.runner.group.environment import VARIABLES, environment

pytest.importorskip("mlx.core")
common = pytest.importorskip("mlx._distributed_utils.common")
launch = pytest.importorskip("mlx._distributed_utils.launch")

PORT = 7000

JOIN = """
import mlx.core as mx
group = mx.distributed.init(strict=True, backend="ring")
total = mx.distributed.all_sum(mx.array([group.rank() + 1.0]), group=group)
print(group.rank(), group.size(), total.item())
"""


def mesh(size: int) -> RdmaMatrix:
    return tuple(tuple(None if a == b else f"rdma_en{2 + (b - a) % size}" for b in range(size)) for a in range(size))


def what_mlx_launch_would_set(tmp_path: Path, endpoints: Sequence[str], backend: str, rdma: RdmaMatrix) -> list[Any]:
    """Per rank (variables, content of files by variable), by MLX's launcher for a hostfile that it has parsed."""
    hosts = [
        {"ssh": f"mac{rank}", "ips": [endpoint.partition(":")[0]], "rdma": list(rdma[rank]) if rdma else []}
        for rank, endpoint in enumerate(endpoints)
    ]
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps({"backend": backend, "hosts": hosts}))
    parsed = common.Hostfile.from_file(hostfile)
    args = argparse.Namespace(
        backend=backend, env=[], cwd=None, verbose=False, starting_port=PORT, python=None, connections_per_ip=1
    )
    launched: list[Any] = []
    keep, launch._launch_with_io = launch._launch_with_io, lambda _, arguments, verbose: launched.extend(arguments)
    try:
        start = launch.launch_ring if backend == "ring" else launch.launch_jaccl
        start(argparse.ArgumentParser(), parsed.hosts, args, ["true"])  # its checks end the process if they fail
    finally:
        launch._launch_with_io = keep
    return [(dict(pair.split("=", 1) for pair in env), files) for (_, _, _, _, files, env, _), _ in launched]


@pytest.mark.parametrize("backend", ["ring", "jaccl", "jaccl-ring"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_gets_what_mlx_launch_would_give_it(tmp_path: Path, backend: GroupBackend, size: int) -> None:
    rdma = () if backend == "ring" else mesh(size)
    endpoints = tuple(f"10.0.0.{r + 1}:{PORT + (r if backend == 'ring' else 0)}" for r in range(size))
    expected = what_mlx_launch_would_set(tmp_path, endpoints, backend, rdma)
    for rank, (variables, files) in enumerate(expected):
        ours = environment(RankWiring(backend, rank, endpoints, rdma), tmp_path)
        assert ours.pop("MLX_RANK") == str(rank)
        for name, content in files.items():
            assert json.loads(Path(ours.pop(name)).read_text()) == json.loads(content)
        assert ours == variables


def test_a_group_that_mlx_could_not_form_is_refused_with_the_rule(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="rank 0 lists the RDMA device rdma_en3 for itself, which must be null"):
        environment(RankWiring("jaccl", 1, ("10.0.0.1:7000", ""), (("rdma_en3",) * 2, (None, None))), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.extended)])
@pytest.mark.extended
def test_mlx_itself_forms_the_group_and_sums_over_it(tmp_path: Path, size: int) -> None:
    endpoints = free_endpoints(size)
    ranks = []
    for rank in range(size):
        folder = tmp_path / str(rank)
        folder.mkdir()
        base = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        variables = {**base, **environment(RankWiring("ring", rank, endpoints), folder)}
        command = ["nice", "-n", "10", sys.executable, "-c", JOIN]
        ranks.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
    try:
        said = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert said == [[str(rank), str(size), str(float(size * (size + 1) // 2))] for rank in range(size)]
