"""One rank: `python rank_program.py JSON`; see tests/support/ranks.py. Prints one line of JSON.

spoil, on the last rank only: "noise" makes attention wrong from the third chunk on; "diverge" changes this rank's own
result after the collectives; "astray" reports a token more than each frame has.
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
from exo_mesh.errors import MeshError
from exo_mesh.rings.runner.group.ranks import RankFiles
from exo_mesh.rings.runner.group.rendezvous import meet


def main(job: dict[str, Any]) -> dict[str, Any]:
    wiring = RankWiring("ring", job["rank"], tuple(job["endpoints"]))
    files = RankFiles()
    files.write(wiring)
    from exo_mesh_mlx import provider

    stage: Any = provider.create()
    meet(wiring, b"k" * 32)
    start, stop, num_layers = job["layers"]
    request = LoadRequest(Shard("tiny", start, stop, num_layers), Path(job["model_dir"]), job["context"], rank=wiring)
    before = peak_bytes()
    stage.load(request, lambda done, total: files.remove())
    files.remove()
    if job["spoil"] and job["rank"] == len(job["endpoints"]) - 1:
        spoil(stage, job["spoil"], job["verify_chunk"])
    answer: dict[str, Any] = {
        "split": sum(stage.shares.split.values()),
        "whole": sorted(stage.shares.whole),
        "whole_bytes": sum(stage.shares.whole.values()),
        "full": stage.shares.full_bytes,
        "peak": peak_bytes(),
        "before": before,
    }
    reduces = count_reduces()
    if job["verify_chunk"]:
        check = stage.verify(job["verify_chunk"], lambda done, total: None)
        answer |= {"worst": check.worst, "all_reduce_s": check.all_reduce_s, "chunk_s": check.chunk_s}
        answer["checked_kv_heads"] = check.kv_heads
    reduces.clear()
    run_frames(stage, job)
    answer["reduces"] = len(reduces)
    answer["peak_all"] = peak_bytes()
    held = [one.cache for one in stage._sequences.values()]
    entries = [entry for cache in held for entry in cache.own_entries()]
    answer["kv_heads"] = [entry.keys.shape[1] for entry in entries if entry.keys is not None]
    answer["shared"] = [cache.shared for cache in held]
    return answer


def count_reduces() -> list[object]:
    """A list that grows by one with each all-reduce from now on."""
    import mlx.core as mx

    seen: list[object] = []
    all_sum = mx.distributed.all_sum

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(None)
        return all_sum(*args, **kwargs)

    mx.distributed.all_sum = counted
    return seen


def run_frames(stage: Any, job: dict[str, Any]) -> None:
    results: dict[str, np.ndarray] = {}
    for index, (rows, token_ids) in enumerate(job["frames"]):
        if copy := job["copies"].get(str(index)):
            stage.copy(*copy, job["context"])
        for sequence, *_ in rows:
            stage.insert(sequence, job["context"])
        output = stage.forward(StageInput(tuple(Row(*row) for row in rows), tuple(token_ids), {}))
        assert not output.faults, output.faults
        if output.logits is not None:
            results[f"logits{index}"] = output.logits
        for name, tensor in output.tensors.items():
            results[f"{name}{index}"] = tensor.numpy()
    np.savez(job["out"], **results)  # type: ignore[arg-type]


def spoil(stage: Any, what: str, chunk: int) -> None:
    import mlx.core as mx
    from exo_mesh_mlx.hooks import hook

    if what == "diverge":
        original = stage._stage.forward
        stage._stage.forward = lambda *args: original(*args) + 0.5
        return
    if what == "astray":
        digest = stage._ranks.digest
        stage._ranks.digest = lambda lines, num_tokens: digest(lines, num_tokens + 1)
        return

    def noisy(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
        out = call(module, *args, **kwargs)
        cache = kwargs.get("cache", args[-1] if args else None)
        beyond = cache is not None and getattr(cache, "offset", 0) > 2 * chunk
        return out + 0.1 * mx.random.normal(out.shape) if beyond else out

    for layer in stage._model.layers:
        hook(layer.self_attn, noisy)


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 0


if __name__ == "__main__":
    try:
        said = main(json.loads(sys.argv[1]))
    except MeshError as exc:
        said = {"error": [type(exc).__name__, str(exc)]}
    print(json.dumps(said), flush=True)
    os._exit(0)
