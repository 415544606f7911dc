"""Flags, variables and keys of programs like this one that are no setting here, and what to use instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from exo_mesh.settings.aliases import ALIASES, unused_protocols

_NO_MASTER = "exo-mesh has no master: all peers are equal"
_LATER = "drafts are not built yet: leave it out; docs/how-it-works/roadmap.md has what comes"

FLAGS = {
    "--force-master": _NO_MASTER,
    "--master": _NO_MASTER,
    "-m": _NO_MASTER,
    "--libp2p-port": "peers talk gRPC: use --grpc-port",
    "--node-id": "each node makes its own id at its first start and keeps it in its home; --name names it for people",
    "--tailscale-api-key": "`ps` shows flags to everybody: write the key into a file, and name that with "
    "--tailscale-api-key-file",
    "--tui": "`exo-mesh top` shows the mesh live in another terminal",
    "--disable-tui": "there is nothing to turn off: a node prints lines; `exo-mesh top` shows the mesh live",
    "--nowordwrap": "use --plain: the text as the model writes it",
    "--keepalive": "a model stays loaded until `exo-mesh stop MODEL`, or as --idle-unload says",
    "--no-loopback-exemption": "being on this machine gives no rights any more; leave it out",
    "--model": "models are loaded on request: --preload NAME loads one at the start, --models-dir DIR says where it is",
    "--models-seed-dir": "use --models-dir DIR: models are read where they are",
    "--max-parallel-downloads": "a node chooses that by what its disk and network can do; leave it out",
    "--max-batch-size": "a ring works on 32 requests at once; --max-queued N bounds those that wait",
    "--no-batch": "requests are computed together as far as the engine is exact; leave it out",
    "--subprocess": "engines always run in processes of their own; leave it out",
    "--proportional-layers": "layers are always shared out by memory; leave it out",
    "--no-worker": "use --max-memory 1MB: the node then holds no layers and still takes requests",
    "--no-downloads": "use --no-fetch",
    "--backend": "how the ranks of a tensor group meet: --group-backend; the engine: --engine",
    "--env": "set variables before you start the node; of MLX only MLX_METAL_FAST_SYNCH matters, see --fast-synch",
    "-n": "each machine runs one node; --tensor-group N makes N of them one stage",
    "--spec-type": _LATER,
    "--spec-draft-n-max": _LATER,
    "--model-draft": _LATER,
}
"""By flag: what to do instead. A verb that has the flag keeps it."""

KEYS = {
    "logging": "use log_format and log_level",
    "tracing": "use trace_retention_days and trace_sample",
    "inference": "there is nothing to set yet; docs/how-it-works/roadmap.md has what comes",
    "auth": "keys are made by `exo-mesh key new`",
    "hf_token": "set it on the page of the node or by PUT /config, or HF_TOKEN in the environment",
    "node_overrides": "the config.toml of each node is that, over the settings of the mesh",
    "mesh": "discovery, bootstrap_peers, hostfile and tensor_group are keys of their own",
    "tensor_parallel": "use tensor_group, group_backend and hostfile",
    "kv": "KV is kept in the model's own type; docs/how-it-works/roadmap.md has what comes",
}
"""Sections and keys of the configuration files of such programs, and what to use in config.toml."""

_AUTOMATIC = "a node works that out by what it measures; leave it out"
_LLAMA = "llama.cpp is no engine of this version; docs/how-it-works/roadmap.md has what comes"

VARIABLES = {
    "RDMA_DEVICES": "a node finds its RDMA devices itself; --hostfile FILE names others, in the `rdma` of each host",
    "SKULK_PIPELINE_EVAL_TIMEOUT_SECONDS": _AUTOMATIC,
    "SKULK_GROUP_CONNECT_DEADLINE_SECONDS": "the ranks of a group have 30 s to meet",
    "SKULK_WARMUP_DEADLINE_SECONDS": _AUTOMATIC,
    "SKULK_SKIP_LLM_WARMUP": "a model is not warmed up: the first request is",
    "SKULK_MLX_HANG_DEBUG": "use --hang-debug SECONDS",
    "SKULK_MLX_HANG_DEBUG_INTERVAL_SECONDS": "use --hang-debug SECONDS",
    "SKULK_NO_BATCH": FLAGS["--no-batch"],
    "SKULK_KV_CACHE_BACKEND": "KV is kept in the model's own type; docs/how-it-works/roadmap.md has what comes",
    "SKULK_LIBP2P_NAMESPACE": "use EXO_MESH_NAMESPACE",
    "EXO_LIBP2P_NAMESPACE": "use EXO_MESH_NAMESPACE",
    "SKULK_LLAMA_CPP_BACKENDS": _LLAMA,
    "SKULK_LLAMA_SERVER_BIN": _LLAMA,
    "SKULK_ZENOH_LISTEN": "use EXO_MESH_HOST and EXO_MESH_GRPC_PORT",
    "SKULK_ZENOH_CONNECT": "use EXO_MESH_BOOTSTRAP_PEERS",
    "SKULK_DATA_REORDER_BUFFER": "frames arrive in order; leave it out",
    "SKULK_EVENT_LOG_DIR": "there is no event log; GET /events reads the flight recorder",
    "RUNNER_MODE": FLAGS["--subprocess"],
    "PROPORTIONAL_LAYERS": FLAGS["--proportional-layers"],
    "RKLLM_SERVER_HOST": "RKLLAMA is no engine of this version; docs/tasks/rk3588.md",
    "RKLLM_SERVER_PORT": "RKLLAMA is no engine of this version; docs/tasks/rk3588.md",
}
"""By variable: what to do instead of setting it."""

_PREFIXES = ("SKULK_", "EXO_")
_OURS = "EXO_MESH_"


def foreign_variables(environ: Mapping[str, str], own: Collection[str]) -> tuple[str, ...]:
    """A warning for each variable that is set for another program and stands for a setting here. own: our variables."""
    taken = {alias.variable for alias in ALIASES}
    found = []
    for name in sorted(environ):
        hint = VARIABLES.get(name, "")
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        if not hint and prefix and not name.startswith(_OURS) and _OURS + name.removeprefix(prefix) in own:
            hint = f"use {_OURS}{name.removeprefix(prefix)}"
        if hint and environ[name] and name not in taken:
            found.append(f"{name} is set and not used: {hint}")
    return (*found, *unused_protocols(environ))
