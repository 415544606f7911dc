"""Malformed requests to a node's file server, and a fetcher whose hub, peers and model directories lie."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.errors import MeshError
from exo_mesh.models.fetcher.wire import Share, Source
from exo_mesh.models.fetcher.writing import LOCK_FILE, make_part
from exo_mesh.models.fetching import Fetcher
from exo_mesh.models.file_server.messages import path_of
from exo_mesh.models.file_server.requests import END_OF_HEAD
from exo_mesh.weights.fetched import MANIFEST_FILE, FetchedFile, Manifest, part_of, write_manifest
from tools.fuzz.calls import many
from tools.fuzz.liar import COMMIT, SIZES, TOKEN, WEIGHTS, Liar, true_files
from tools.fuzz.mutate import TEXTS, mutated
from tools.fuzz.rig import MIB, MODEL, Rig

COUNT, NUM_NODES, CLOSED = 20_000, 1, False
FLAGS = ("--discovery", "none")
ANSWER_S = 5.0
INCOMPLETE_S = 0.3
FETCH_S = 3.0
"""After this time a request to the fetcher is cancelled, because the fetcher backs off from sources that may
recover."""

FETCHER_SHARE = 0.2
"""Share of the messages that are models for a fetcher, each of which causes several requests."""

MAX_FETCHER_BYTES = 700 * MIB
CANARY = b"nobody may write here"


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    num_models = int(count * FETCHER_SHARE)
    outcomes = await _attack_node(rig, rng, count - num_models)
    return outcomes + await _attack_fetcher(rig, rng.randrange(2**32), num_models)


def request_bytes(rng: random.Random) -> bytes:
    """Returns a mutated request of a fetcher, mostly for something that exists."""
    files = (
        "",
        WEIGHTS,
        "config.json",
        "tokenizer.json",
        "..",
        "../" * 9 + "etc/passwd",
        "/etc/passwd",
        "x" * 300,
        *TEXTS,
    )
    lines = [f"GET {path_of(rng.choice((MODEL, MODEL, *TEXTS)), rng.choice(files))} HTTP/1.1", "Host: peer"]
    lines += rng.choice(([], [f"Range: bytes={rng.randrange(9000)}-{rng.choice(('', rng.randrange(9000), 2**62))}"]))
    lines += rng.choice(([], [f'If-Match: "{rng.choice(TEXTS)[:99]}"'.replace("\n", " ")]))
    lines += rng.choice(([], [f"Exo-Wait-S: {rng.choice(('0.01', 'x', '-1', '1e9'))}"]))
    whole = "\r\n".join([*lines, "", ""]).encode()
    return mutated(rng, whole) if rng.random() < 0.8 else whole


async def _attack_node(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    port, seed = rig.files_port, rng.randrange(2**32)

    async def one(number: int) -> str:
        data = request_bytes(random.Random(f"{seed}/{number}"))
        try:
            async with asyncio.timeout(ANSWER_S if END_OF_HEAD in data else INCOMPLETE_S):
                return await _ask(port, data)
        except TimeoutError:
            return "NO ANSWER" if END_OF_HEAD in data else "incomplete"
        except OSError as exc:
            return type(exc).__name__

    return await many(count, one)


async def _ask(port: int, data: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        head = await reader.read(100)
    finally:
        writer.close()
    return head[9:12].decode("ascii", "replace") if head else "closed"


async def _attack_fetcher(rig: Rig, seed: int, count: int) -> Counter[str]:
    """Attacks a real fetcher; everything must stay below `models`."""
    root = Path(rig.nodes[0].ready["home"]).parent / "fetching"
    liar = Liar(seed, true_files(root / "truth"), root)
    await liar.start()
    canary = root / "canary"
    canary.write_bytes(CANARY)
    tasks = TaskOwner()
    environ = {"HF_ENDPOINT": liar.url, "HF_TOKEN": TOKEN, "HF_HOME": str(root / "hf"), "NO_PROXY": "127.0.0.1"}
    environ |= {"HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2", "HF_HUB_DISABLE_TELEMETRY": "1"}
    fetcher = Fetcher(tasks, environ={**os.environ, **environ})
    with suppress(MeshError):
        await fetcher.search("m0", 1)  # it starts
    pid = fetcher.pid
    try:
        outcomes = await many(count, lambda number: _fetch(fetcher, liar, root, seed, number))
        _judge(rig, liar, root, pid, fetcher.pid)
    finally:
        await fetcher.close()
        await tasks.close()
        await liar.stop()
    outcomes["answers of liars"] = liar.num_answers
    return outcomes


async def _fetch(fetcher: Fetcher, liar: Liar, root: Path, seed: int, number: int) -> str:
    rng = random.Random(f"{seed}-{number}")
    model_dir, name = root / "models" / "org" / f"m{number}", f"org/m{number}"
    source = rng.choice((Source(), Source("p" * 32, (liar.url,))))
    try:
        async with asyncio.timeout(FETCH_S):
            if number % 5 == 0:
                size = _hostile_directory(model_dir, root, liar, rng)
            elif number % 50 == 1:
                await fetcher.search(f"m{number}", 20)
                return "found"
            else:
                await fetcher.resolve(name, model_dir, repo=name, sources=(source,))
                size = (model_dir / f"{WEIGHTS}.part").stat().st_size
            await fetcher.fetch(model_dir, [Share({WEIGHTS: ((0, size),)}, (source,))])
            return "fetched"
    except MeshError as exc:
        return exc.code
    except (TimeoutError, FileNotFoundError) as exc:
        return type(exc).__name__
    finally:
        shutil.rmtree(model_dir, ignore_errors=True)


def _hostile_directory(model_dir: Path, root: Path, liar: Liar, rng: random.Random) -> int:
    """Creates a hostile model directory with a manifest; returns the size that the manifest gives its weights."""
    shutil.copytree(root / "truth", model_dir)
    size = (model_dir / WEIGHTS).stat().st_size
    (model_dir / WEIGHTS).unlink()
    said = rng.choice([size, size, *(value for value in SIZES if isinstance(value, int) and 0 <= value < 2**63)])
    spans = rng.choice(([], [(0, 8)], [(0, said)], [(0, 2**62)], [(5, 1)], [(i, i + 1) for i in range(0, 40_000, 2)]))
    names: Sequence[str] = rng.choice(
        ((WEIGHTS,), (WEIGHTS, "../evil.safetensors"), (WEIGHTS, MANIFEST_FILE), (WEIGHTS, f"{root}/evil"),
         (WEIGHTS, "x" * 300), tuple(itertools.chain([WEIGHTS], (f"f{i}.safetensors" for i in range(1000)))))
    )  # fmt: skip
    files = {name: FetchedFile(said, rng.choice(("", "0" * 64)), list(spans)) for name in names}
    write_manifest(model_dir, Manifest(f"org/{model_dir.name}", f"org/{model_dir.name}", COMMIT, files))
    manifest = model_dir / MANIFEST_FILE
    kind = rng.randrange(6)
    if kind == 0:
        manifest.write_bytes(mutated(rng, manifest.read_bytes()))
    elif kind == 1:
        with suppress(OSError):
            make_part(part_of(model_dir, WEIGHTS), said)
    elif kind == 2:
        os.mkfifo(part_of(model_dir, WEIGHTS))
    elif kind == 3:
        target = rng.choice((root / "canary", root / "evil.new"))
        rng.choice((part_of(model_dir, WEIGHTS), model_dir / f"{MANIFEST_FILE}.new", model_dir / LOCK_FILE)).symlink_to(
            target
        )
    elif kind == 4:
        manifest.write_text(
            json.dumps({"name": rng.choice(TEXTS), "files": {WEIGHTS: {"size": said, "present": [[0]]}}})
        )
    return int(said)


def _judge(rig: Rig, liar: Liar, root: Path, began_as: int | None, pid: int | None) -> None:
    """Records in rig.harm what the fetcher did that it must not do."""
    if pid is None or pid != began_as:
        rig.harm.append("the fetcher has ended")
    else:
        process = psutil.Process(pid)
        status = Path(f"/proc/{pid}/status").read_text() if Path("/proc/self/status").exists() else ""
        peak = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
        rig.notes.append(
            f"fetcher: {process.memory_info().rss / MIB:.0f} MiB, at most {peak / MIB:.0f}; {process.num_fds()} files; "
            f"{process.num_threads()} threads; lies {dict(liar.lies)}; {len(liar.seen_elsewhere)} requests elsewhere"
        )
        if peak > MAX_FETCHER_BYTES:
            rig.harm.append(f"the fetcher used {peak / MIB:.0f} MiB")
    if any(TOKEN.encode() in head for head in liar.seen_elsewhere):
        rig.harm.append("the token went to another host")
    if (root / "canary").read_bytes() != CANARY:
        rig.harm.append("a file outside the model directory was written")
    strange = [str(path) for path in root.glob("*") if path.name not in ("truth", "canary", "hf", "models")]
    strange += [str(path) for path in (root / "models").glob("*") if path.name != "org"]
    strange += [str(path) for path in (root / "models" / "org").glob("*") if "evil" in path.name]
    rig.harm += [f"{path} was made" for path in strange]
