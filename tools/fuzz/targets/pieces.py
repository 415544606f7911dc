"""A hub, or a peer beside a right hub, that sends one wrong byte of the weights to two nodes that fetch their layers.

An answer may come from right bytes only; from others only while `/health` says that they are not verified.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from exo_mesh.errors import MeshError
from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint
from tests.support.hub import LoopbackHub
from tools.fuzz.models import LISTED_S
from tools.fuzz.rig import Rig, start_peer

COUNT, NUM_NODES, CLOSED = 4, 2, False
FLAGS = ("--discovery", "none", "--engine", "numpy")
MAX_NODE_SHARE = 1.6
PLACE_S = 90.0
UNVERIFIED = "unverified"

_SHAPE = TinyModel(layers=4, hidden=128, heads=4, kv_heads=2, intermediate=384, vocab=600)


class WrongPieces(LoopbackHub):
    """A hub that changes one byte of each weights file whenever it sends it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def wrong_byte(self, file: Path) -> int:
        """Returns where the byte is: anywhere behind the header."""
        rng = random.Random(f"{self._seed}/{file.parent.name}/{file.name}")
        size = file.stat().st_size
        return size // 20 + rng.randrange(size - size // 20)


@contextmanager
def prepared(directory: Path, seed: int, numbers: Sequence[int]) -> Iterator[dict[str, str]]:
    """Writes a checkpoint for each case, and starts the hub that corrupts them."""
    with WrongPieces(seed) as hub:
        for number in numbers:
            truth = write_checkpoint(directory / "truth" / f"m{number}", _SHAPE)
            is_of_peer = number % 2 == 1
            wrong = _corrupt(hub, directory / ("evil/org" if is_of_peer else "wrong"), truth)
            hub.add(f"org/m{number}", truth if is_of_peer else wrong)
        yield {**hub.environment, "HF_HOME": str(directory / "hf")}


def _corrupt(hub: WrongPieces, folder: Path, truth: Path) -> Path:
    """Copies a checkpoint with one wrong byte. A hub goes on to announce the digest of the right file."""
    wrong = folder / truth.name
    wrong.mkdir(parents=True)
    for file in truth.iterdir():
        content = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            content[hub.wrong_byte(file)] ^= 0x40
        (wrong / file.name).write_bytes(content)
        found = (wrong / file.name).stat()
        hub._digests[(wrong / file.name, found.st_size, found.st_mtime_ns)] = hub.sha256(file)
    return wrong


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Places each model over both nodes and asks it, until its bytes have been judged. The peer has files, but no
    memory for layers: what it computes itself could not be checked."""
    outcomes: Counter[str] = Counter()
    with ExitStack() as stack:
        if (rig.directory / "evil").exists():
            peer = await asyncio.to_thread(start_peer, rig, rig.directory / "evil", "--max-memory", "1MB")
            stack.callback(peer.stop)
            await asyncio.to_thread(_await_listed, rig, f"m{rig.first | 1}")
        for number in range(rig.first, rig.first + count):
            outcomes[await asyncio.to_thread(_try, rig, number)] += 1
    return outcomes


def _await_listed(rig: Rig, name: str) -> None:
    """Waits until the first node knows a model of the peer."""
    end = time.monotonic() + LISTED_S
    while name not in json.dumps(rig.api.get("/state")) and time.monotonic() < end:
        time.sleep(0.2)


def _try(rig: Rig, number: int) -> str:
    name = f"org/m{number}"
    try:
        rig.api.post("/instance", {"model": name, "min_peers": 2}, PLACE_S)
        rig.api.post("/v1/completions", {"model": name, "prompt": "7", "max_tokens": 4}, PLACE_S)
    except MeshError as exc:
        return exc.code
    is_marked = UNVERIFIED in json.dumps(rig.api.get("/health"))
    differs = _num_wrong(rig, number)
    with suppress(MeshError):
        rig.api.delete(f"/instance/{name.replace('/', '-')}-1")
    if differs and not is_marked:
        rig.harm.append(f"case {rig.seed}/{number}: {name} was served with {differs} wrong bytes, and no word of it")
        return "served wrong"
    return "marked" if differs else "served right"


def _num_wrong(rig: Rig, number: int) -> int:
    """Counts the bytes on the nodes' disks that differ from the right ones; bytes that are not there count as right."""
    truth = rig.directory / "truth" / f"m{number}"
    wrong = 0
    for home in (Path(node.ready["home"]) for node in rig.nodes):
        for file in home.rglob("*.safetensors*"):
            if f"m{number}" in str(file.parent) and (truth / file.name.removesuffix(".part")).exists():
                wrong += _differences(file, truth / file.name.removesuffix(".part"))
    return wrong


def _differences(file: Path, right: Path) -> int:
    with suppress(OSError):
        have, want = file.read_bytes(), right.read_bytes()
        size = os.stat(right).st_size
        return sum(a != b and a != 0 for a, b in zip(have[:size], want, strict=False))
    return 0
