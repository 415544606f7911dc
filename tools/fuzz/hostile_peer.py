"""Two nodes of an open mesh, and a third one whose owner is hostile: it announces twelve models that do harm.

Both nodes are asked for each model. None may end, both must answer meanwhile, and their memory must come back.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from exo_mesh.cli.client.child_node import ChildNode
from exo_mesh.errors import MeshError
from tools.fuzz.calls import judged_post
from tools.fuzz.models import ANSWER_S, LISTED_S, demo_model, edit_json
from tools.fuzz.rig import MIB, Prober, Reading, Rig, Watch, beside_hog, running, start_peer, verdict
from tools.fuzz.targets import headers, templates, tokenizers

MAX_LEFT = 1.2
"""Memory of a node afterwards, as a share of what it had before."""

MAX_PEAK = 1.6
BACK_S = 30.0


def _replaced(part: str, kind: str, char: str, times: int) -> Callable[[random.Random, Path], None]:
    steps = [{"type": "Replace", "pattern": {"String": char}, "content": char * 10}] * times
    grown = {"type": "Sequence", kind: steps}
    return lambda rng, model: edit_json(model / "tokenizer.json", lambda d: d.update({part: grown}))


def _template(text: str) -> Callable[[random.Random, Path], None]:
    return lambda rng, model: edit_json(model / "tokenizer_config.json", lambda d: d.update(chat_template=text))


def _wrong_digest(rng: random.Random, model: Path) -> None:
    """Announces a model under a digest that is not the one of its weights, and cuts them."""
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])


MODELS: dict[str, Callable[[random.Random, Path], object]] = {
    "normalizer-9": _replaced("normalizer", "normalizers", "a", 9),
    "normalizer-7": _replaced("normalizer", "normalizers", "a", 7),
    "decoder-9": _replaced("decoder", "decoders", " ", 9),
    "added-tokens": tokenizers.added_tokens,
    "post-processor": tokenizers.post_processor,
    "merges": tokenizers.merges,
    "template-loop": _template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
    "template-growth": _template(templates.GROWTH[0]),
    "wide-config": headers.wide_config,
    "nan-weights": headers.nan_weights,
    "shapes": headers.absurd_shapes,
    "wrong-digest": _wrong_digest,
}


def run(settle_s: float) -> list[str]:
    """Prints a row for each model, and a line of figures; returns the problems."""
    with tempfile.TemporaryDirectory(prefix="exo-mesh-hostile-") as path:
        directory = Path(path)
        with running(directory, 2, ["--discovery", "none", "--open-admin"], closed=False) as rig:
            evil = _start_evil(directory, rig)
            try:
                _await_models(rig, evil)
                return asyncio.run(_attack(rig, settle_s))
            finally:
                evil.stop()


def _start_evil(directory: Path, rig: Rig) -> ChildNode:
    folder = directory / "evil-models"
    folder.mkdir()
    for name, edit in MODELS.items():
        edit(random.Random(name), demo_model(folder / name))
    return start_peer(rig, folder)


def _await_models(rig: Rig, evil: ChildNode) -> None:
    """Waits until both nodes list some of the models: the hostile node itself may find some of them unusable."""
    end = time.monotonic() + LISTED_S
    while time.monotonic() < end and evil.alive:
        listed = [json.dumps(rig.api_of(index).get("/v1/models")) for index in (0, 1)]
        if all(sum(name in text for name in MODELS) >= len(MODELS) // 2 for text in listed):
            return
        time.sleep(0.2)


async def _attack(rig: Rig, settle_s: float) -> list[str]:
    hog_s, before = await beside_hog(rig), Reading.of(rig)
    prober = Prober(rig, 0.05)
    probing = asyncio.create_task(prober.run())
    print(f"{'model':<18}{'first node':>12}{'second node':>13}{'seconds':>9}{'worst /healthz, s':>19}")
    with Watch(rig) as watch:
        for name in MODELS:
            began, num_before = time.monotonic(), len(prober.took_s)
            statuses = [await _ask(rig, index, name) for index in (0, 1)]
            worst = max(prober.took_s[num_before:], default=0.0)
            print(
                f"{name:<18}{statuses[0]:>12}{statuses[1]:>13}{time.monotonic() - began:>9.1f}{worst:>19.3f}",
                flush=True,
            )
        await asyncio.sleep(settle_s)
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    left = await _memory_left(rig, before)
    found = verdict(rig, before, Reading.of(rig), prober, only_nodes=True)
    if watch.node_share > MAX_PEAK:
        found.append(f"a node took {watch.node_share:.2f} times its memory, at most {MAX_PEAK} are right")
    if left > MAX_LEFT:
        found.append(f"a node keeps {left:.2f} times its memory, at most {MAX_LEFT} are right")
    for line in found:
        print(f"  {line}")
    print(
        f"hostile-peer: {sum(node.alive for node in rig.nodes)} of 2 nodes live; memory at most {watch.node_share:.2f} "
        f"times and at last {left:.2f} times its start, a child {watch.child_bytes / MIB:.0f} MiB; "
        f"{watch.cpu_s:.1f} s of CPU of the nodes; /healthz p99 {1000 * prober.p99_s:.0f} ms, "
        f"{prober.p99_s / hog_s:.1f} times that beside a "
        f"busy process ({1000 * hog_s:.0f} ms), slowest {prober.worst_s:.2f} s, {prober.num_failed} without an answer",
        flush=True,
    )
    return found


async def _ask(rig: Rig, index: int, name: str) -> str:
    if not rig.nodes[index].alive:
        return "dead"
    port = int(rig.nodes[index].url.rstrip("/").rpartition(":")[2])
    messages = [{"role": "user", "content": "a b a"}]
    data = json.dumps({"model": name, "messages": messages, "max_tokens": 4}).encode()
    status = await judged_post(rig, "/v1/chat/completions", data, ANSWER_S, f"{name} at node {index}", port)
    with suppress(MeshError):
        await asyncio.to_thread(rig.api_of(index).delete, f"/instance/{name}-1")
    return status


async def _memory_left(rig: Rig, before: Reading) -> float:
    """Returns the memory of the nodes as a share of what they had, once it is small again or BACK_S are over."""
    end = time.monotonic() + BACK_S
    pids = [node.pid for node in rig.nodes]
    while True:
        after = Reading.of(rig).rss_of
        left = max((after[pid] / before.rss_of[pid] for pid in pids if pid in after), default=0.0)
        if left <= MAX_LEFT or time.monotonic() > end:
            return left
        await asyncio.sleep(0.5)
