"""The variables and files by which `mx.distributed.init` finds the other ranks, for the process of one rank.

They must be set before `mlx.core` is imported. The formats are those of MLX's own launcher (`mlx.launch`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.domain.wiring_rules import MLX_VARIABLES, wiring_obstacle
from exo_mesh.errors import EngineError

RANK = "MLX_RANK"
HOSTFILE = "MLX_HOSTFILE"
IBV_DEVICES = "MLX_IBV_DEVICES"
COORDINATOR = "MLX_JACCL_COORDINATOR"
JACCL_RING = "MLX_JACCL_RING"

VARIABLES = MLX_VARIABLES


def environment(wiring: RankWiring, folder: Path) -> dict[str, str]:
    """The variables for one rank; their files are written into `folder`, which must be private and outlive the process.
    Raises EngineError, naming the broken rule, if MLX could not form this group."""
    if obstacle := wiring_obstacle(wiring.backend, wiring.endpoints, wiring.rdma):
        raise EngineError(f"the tensor group cannot be formed: {obstacle}")
    variables = {RANK: str(wiring.rank)}
    if wiring.backend == "ring":
        # MLX can open several sockets between two ranks and expects a list per rank; one socket is enough here
        hosts = [[endpoint] for endpoint in wiring.endpoints]
        return {**variables, HOSTFILE: _written(folder / "hosts.json", hosts)}
    variables[IBV_DEVICES] = _written(folder / "devices.json", wiring.rdma)
    variables[COORDINATOR] = wiring.endpoints[0]
    return {**variables, JACCL_RING: "1"} if wiring.backend == "jaccl-ring" else variables


def _written(file: Path, content: Any) -> str:
    file.write_text(json.dumps(content))
    return str(file)
