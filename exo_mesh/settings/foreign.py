"""Flags, variables and keys of similar programs that exo-mesh does not have, with what to use instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from exo_mesh.settings.aliases import ALIASES, unused_protocols

_NO_MASTER = "exo-mesh has no master: all peers are equal"
_MEASURED = "leave it out: how many tokens are drafted follows from measured times; see --draft"
_NO_DRAFT_MODEL = "drafts come from the text itself (--draft suffix), not from a second model yet"

FLAGS = {
    "--force-master": _NO_MASTER,
    "--master": _NO_MASTER,
    "-m": _NO_MASTER,
    "--libp2p-port": "peers use gRPC: set --grpc-port",
    "--node-id": "each node makes its own id at its first start and keeps it in its home; --name names it for people",
    "--tailscale-api-key": "`ps` shows flags to every user: write the key to a file and name it with "
    "--tailscale-api-key-file",
    "--tui": "`exo-mesh top` shows the mesh live in another terminal",
    "--disable-tui": "there is nothing to turn off: a node prints plain lines; `exo-mesh top` shows the mesh live",
    "--nowordwrap": "use --plain, which prints the text as the model writes it",
    "--keepalive": "a model stays loaded until `exo-mesh stop MODEL`, or as long as --idle-unload sets",
    "--no-loopback-exemption": "being on this machine gives no rights any more; leave it out",
    "--model": "requests load models: --preload NAME loads one at the start, --models-dir DIR sets where it is",
    "--models-seed-dir": "use --models-dir DIR: models are read in place",
    "--max-parallel-downloads": "a node adapts this to its disk and network; leave it out",
    "--subprocess": "engines always run in separate processes; leave it out",
    "--no-worker": "use --role api: the node then holds no layers but still accepts requests",
    "--no-downloads": "use --no-fetch",
    "--backend": "use --group-backend for the ranks of a tensor group, --engine for the engine",
    "--env": "set variables before you start the node; of MLX only MLX_METAL_FAST_SYNCH matters, see --fast-synch",
    "-n": "each machine runs one node; --tensor-group N makes N of them one stage",
    "--no-prefix-cache": "use --prefix-cache off",
    "--spec-type": "use --draft auto, suffix or off",
    "--spec-draft-n-max": _MEASURED,
    "--draft-max": _MEASURED,
    "--model-draft": _NO_DRAFT_MODEL,
}
"""By flag of a node: what to use instead. A verb that has the flag itself accepts it."""

_LONGEST = "use --max-tokens"
_CONTEXT = "use --context-limit"
_TALK = "leave the question out: a conversation starts by itself"
_MODEL_FIRST = "the model needs no flag: exo-mesh run MODEL PROMPT"

ASKING_FLAGS = {
    "-m": _MODEL_FIRST,
    "--model": _MODEL_FIRST,
    "-hf": "name the repository as the model: exo-mesh run ORG/NAME",
    "--hf-repo": "name the repository as the model: exo-mesh run ORG/NAME",
    "-p": "use --prompt, or write the question after the model",
    "-f": "let the shell read the file: exo-mesh run MODEL < FILE",
    "--file": "let the shell read the file: exo-mesh run MODEL < FILE",
    "-n": _LONGEST,
    "--predict": _LONGEST,
    "--n-predict": _LONGEST,
    "--num-predict": _LONGEST,
    "--temp": "use --temperature",
    "-s": "use --seed",
    "-sys": "use --system",
    "-c": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "--num-ctx": _CONTEXT,
    "-i": _TALK,
    "--interactive": _TALK,
    "-cnv": _TALK,
    "--conversation": _TALK,
    "--hidethinking": "use --think off; in a pipe only the answer is printed anyway",
    "--format": "ask the API with response_format: see docs/reference/api.md",
    "-ngl": "an engine uses the GPU that it finds; --engine names another engine",
    "--n-gpu-layers": "an engine uses the GPU that it finds; --engine names another engine",
}
"""By flag with which other programs ask a model: what to use instead of it with `run`."""

KEYS = {
    "logging": "use log_format and log_level",
    "tracing": "use trace_retention_days and trace_sample",
    "inference": "there is nothing to set yet; see docs/how-it-works/roadmap.md",
    "auth": "make keys with `exo-mesh key new`",
    "hf_token": "set it on the web page, with PUT /config, or as HF_TOKEN in the environment",
    "node_overrides": "use flags or EXO_MESH_ variables of each node, which override the settings of the mesh",
    "mesh": "discovery, bootstrap_peers, hostfile and tensor_group are keys of their own",
    "tensor_parallel": "use tensor_group, group_backend and hostfile",
    "kv": "use prefix_cache, and for KV on disk prefix_disk (ssd_cache_dir) and prefix_disk_days (ssd_ttl_days)",
}
"""By section or key in configuration files of such programs: what to use in config.toml."""

_AUTOMATIC = "a node derives this from its measurements; leave it out"

RENAMED = {
    "PIPELINE_EVAL_TIMEOUT_SECONDS": _AUTOMATIC,
    "GROUP_CONNECT_DEADLINE_SECONDS": "the ranks of a group have 30 s to connect",
    "WARMUP_DEADLINE_SECONDS": _AUTOMATIC,
    "SKIP_LLM_WARMUP": "use EXO_MESH_SKIP_WARMUP",
    "MLX_HANG_DEBUG": "use --hang-debug SECONDS",
    "MLX_HANG_DEBUG_INTERVAL_SECONDS": "use --hang-debug SECONDS",
    "NATIVE_VISION_REFERENCE_PATH": "tests compare each family with transformers; see docs/tasks/images.md",
    "KV_CACHE_BACKEND": "KV has the model's own dtype; see docs/how-it-works/roadmap.md",
    "LLAMA_SERVER_BIN": "use --llama-server FILE",
    "LLAMA_CPP_BACKENDS": "use --engine llamacpp --engine-option device=vulkan+cpu, or another backend",
    "LLAMA_CPP_LOGITS_ALL": "every request may ask for logprobs, which take no memory beforehand; leave it out",
    "LLAMA_CPP_LOGITS_ALL_N_CTX": "logprobs do not limit the context; --context-limit does",
    "LLAMA_CPP_FLASH_ATTN": "use --engine llamacpp --engine-option flash=on; it is off by default, see "
    "docs/reference/engines/llamacpp.md",
    "LLAMA_SERVER_BACKENDS": "use --server-option openai.backends=vulkan, or other backends",
    "LLAMA_SERVER_FORCE_NO_SPEC": "use --server-option openai.no_spec=true",
    "ZENOH_LISTEN": "use EXO_MESH_HOST and EXO_MESH_GRPC_PORT",
    "ZENOH_CONNECT": "use EXO_MESH_BOOTSTRAP_PEERS",
    "LIBP2P_NAMESPACE": "use EXO_MESH_NAMESPACE",
    "DATA_REORDER_BUFFER": "frames arrive in order; leave it out",
    "EVENT_LOG_DIR": "there is no event log; GET /events reads the flight recorder",
    "TEST_DISTRIBUTED_MODEL": "scripts/test_distributed_2node.py has a flag for it; see docs/tasks/scripts.md",
    "MAX_TOKENS": "use EXO_MESH_MAX_GENERATE_TOKENS",
}
"""By what follows SKULK_, EXO_ or EXO_MESH_ in a variable: what to use instead."""

PREFIXES = ("SKULK_", "EXO_", "EXO_MESH_")
_TAKEN = frozenset(alias.variable for alias in ALIASES)

VARIABLES = {
    "RDMA_DEVICES": "a node finds its RDMA devices by itself; --hostfile FILE sets others, in the `rdma` of each host",
    "SKULK_IMAGE_TRANSPORT_DEBUG": "use --image-transport-debug",
    "SKULK_VISION_DEBUG_SAVE_DIR": "use --vision-debug-save-dir DIR",
    "RUNNER_MODE": FLAGS["--subprocess"],
    **{prefix + name: hint for name, hint in RENAMED.items() for prefix in PREFIXES if prefix + name not in _TAKEN},
}
"""By variable that changes nothing: what to use instead."""

_OURS = "EXO_MESH_"


def foreign_variables(environ: Mapping[str, str], own: Collection[str]) -> tuple[str, ...]:
    """A warning for each variable of another program that corresponds to a setting here. own: our variables."""
    found = []
    for name in sorted(environ):
        hint = VARIABLES.get(name, "")
        prefix = next((prefix for prefix in PREFIXES[:2] if name.startswith(prefix)), "")
        if not hint and prefix and not name.startswith(_OURS) and _OURS + name.removeprefix(prefix) in own:
            hint = f"use {_OURS}{name.removeprefix(prefix)}"
        if hint and environ[name] and name not in _TAKEN:
            found.append(f"{name} is set but not used: {hint}")
    return (*found, *unused_protocols(environ))
