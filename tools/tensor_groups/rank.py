"""`python -m tools.tensor_groups.rank RANK ENDPOINTS FOLDER ARCHITECTURE...`: runs one rank through all architectures.

The leader first computes each tiny random model alone. It prints a line of JSON for each architecture.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.engine.contract import LoadRequest, StageInput
from exo_mesh.rings.runner.group.ranks import RankFiles
from exo_mesh.rings.runner.group.rendezvous import meet

CONTEXT = 128
CHUNK = 16
FRAMES = (23, 18, 1, 1, 1, 1, 1, 1)
"""Tokens of each frame: a prompt in two chunks, then decode steps."""


def main(argv: list[str]) -> None:
    rank, endpoints, folder, *names = argv
    wiring = RankWiring("ring", int(rank), tuple(json.loads(endpoints)))
    files = RankFiles()
    files.write(wiring)
    from exo_mesh_mlx.ranks import Ranks

    meet(wiring, b"tensor group architectures table")
    ranks = Ranks(wiring)
    files.remove()
    for name in names:
        answer = _check(name, Path(folder) / name, wiring, ranks)
        if wiring.is_leader:
            print(json.dumps(answer), flush=True)


def _check(name: str, directory: Path, wiring: RankWiring, ranks: Any) -> dict[str, Any]:
    from tools.architectures.mlx_configs import num_layers, tiny_config
    from tools.architectures.mlx_models import write_checkpoint

    answer: dict[str, Any] = {"architecture": name}
    layers, expected, reason = 0, None, ""
    try:
        config = tiny_config(name)
        layers = num_layers(config)
        if wiring.is_leader:
            directory.mkdir(parents=True)
            expected = _run(_load(write_checkpoint(directory, config), layers, None))
            if not np.isfinite(expected[:, : expected.shape[1] // 2]).any() or not np.ptp(
                expected[np.isfinite(expected)]
            ):
                raise RuntimeError("the tiny model's logits are useless: not a number, or all the same")
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - model files of mlx-lm may do anything, exit included
        reason = f"{type(exc).__name__}: {' '.join(str(exc).split())}"[:200]
    # the other ranks wait here until the checkpoint is written
    (absent,) = ranks.of_leader([float(bool(reason))])
    if absent:
        return {**answer, "absent": reason}
    try:
        stage = _load(directory, layers, wiring)
        check = stage.verify(CHUNK, lambda done, total: None)
        got = _run(stage)
    except Exception as exc:  # noqa: BLE001 - the error goes into the table
        return {**answer, "failed": f"{type(exc).__name__}: {' '.join(str(exc).split())}"[:300]}
    if expected is not None:
        answer["difference"] = float(np.abs(np.where(np.isfinite(expected), got - expected, 0.0)).max())
    return {
        **answer,
        "canary": check.worst,
        "split": sum(stage.shares.split.values()),
        "full": stage.shares.full_bytes,
        "whole": sum(stage.shares.whole.values()),
        "kinds": sorted({kind.partition(".")[2] for kind in stage.shares.whole}),
    }


def _load(directory: Path, layers: int, rank: RankWiring | None) -> Any:
    from exo_mesh_mlx.engine import MlxStage

    stage = MlxStage()
    shard = Shard("tiny", 0, layers, layers)
    stage.load(LoadRequest(shard, directory, CONTEXT, rank=rank), lambda done, total: None)
    return stage


def _run(stage: Any) -> np.ndarray:
    """Returns logits of every position, `[tokens, vocab]`."""
    stage.insert(1, CONTEXT)
    logits, begin = [], 0
    for n in FRAMES:
        ids = tuple((7 * place + 3) % 90 for place in range(begin, begin + n))
        output = stage.forward(StageInput((Row(1, begin, n, n),), ids, {}))
        if output.faults:
            raise RuntimeError(str(output.faults))
        logits.append(output.logits)
        begin += n
    stage.remove(1)
    return np.concatenate(logits)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
