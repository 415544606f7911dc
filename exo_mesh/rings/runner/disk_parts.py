"""Makes the parts of the disk tier for one stage, from its setup."""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from pathlib import Path

from exo_mesh import __version__
from exo_mesh.engine.registry import provider
from exo_mesh.errors import ModelError
from exo_mesh.rings.prefix_disk.folder import StageFolder
from exo_mesh.rings.prefix_disk.makers import KvMaker
from exo_mesh.rings.runner.disk_store import DiskStore
from exo_mesh.rings.runner.prefix.disk_index import DiskIndex
from exo_mesh.rings.runner.stage_setup import StageSetup
from exo_mesh.weights.fetched import read_manifest


def disk_store(setup: StageSetup) -> DiskStore | None:
    """The started files of a stage, or of one rank of it; None if it has none."""
    if setup.disk is None or setup.prefix_bytes == 0:
        return None
    maker = _maker(setup).text
    folder = StageFolder(
        setup.disk.root, _folder_name(setup, maker), maker, setup.disk.limits, setup.disk.secret or None
    )
    store = DiskStore(folder, why_not=lambda: _why_not(setup.model_dir))
    store.start()
    return store


def _why_not(model_dir: Path) -> str:
    """Why no KV of a model may be on disk; "" if it may. What was computed with wrong weights must not outlive them,
    and the stages behind this one compute from its results: a ring uses its disks only if all stages have theirs."""
    try:
        manifest = read_manifest(model_dir)
    except ModelError as exc:
        return str(exc)
    files = manifest.files.items() if manifest is not None else ()
    if any(file.sha256 and file.is_unverified_in(model_dir, name) for name, file in files):
        return "the weights are not compared with the digests of their files yet"
    return ""


def disk_index(setup: StageSetup, store: DiskStore | None) -> DiskIndex | None:
    """The driver's index; None if its own stage has no files."""
    if store is None or setup.disk is None:
        return None
    secret = blake2b(setup.disk.secret, digest_size=32, person=b"hashes").digest() if setup.disk.secret else b""
    return DiskIndex(setup.num_stages, ring_of(setup), store.known, secret)


def ring_of(setup: StageSetup) -> bytes:
    """Describes what decides the KV of a prompt, besides its tokens: the model, and which engine computes which
    layers. How many ranks share them is part of it only for tensor groups."""
    plan = setup.plan
    stages = [
        (stage.engine, stage.shard.start, stage.shard.stop, *([] if stage.group is None else [stage.group.size]))
        for stage in plan.stages
    ]
    return json.dumps([plan.model, plan.model_digest, plan.activation_dtype, stages]).encode()


def _maker(setup: StageSetup) -> KvMaker:
    """The stage whose files these are, or the rank."""
    plan, stage = setup.plan, setup.plan.stages[setup.index]
    shard, rank = stage.shard, setup.rank
    return KvMaker(
        plan.model,
        plan.model_digest,
        plan.activation_dtype,
        shard.start,
        shard.stop,
        shard.num_layers,
        (__version__, stage.engine, provider(stage.engine).version()),
        setup.options,
        0 if rank is None else rank.rank,
        0 if rank is None else rank.size,
    )


def _folder_name(setup: StageSetup, maker: str) -> str:
    """`<model>-<digest>/<engine>-layers-<start>-<stop>-<hash of the maker>/rank-<rank>`, below the root."""
    plan, stage = setup.plan, setup.plan.stages[setup.index]
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.model)[:64].strip(".-") or "model"
    digest = re.sub(r"[^A-Za-z0-9]+", "", plan.model_digest)[-12:] or "unknown"
    stamp = blake2b(maker.encode(), digest_size=4).hexdigest()
    layers = f"{stage.engine}-layers-{stage.shard.start}-{stage.shard.stop}-{stamp}"
    return f"{model}-{digest}/{layers}/rank-{0 if setup.rank is None else setup.rank.rank}"
