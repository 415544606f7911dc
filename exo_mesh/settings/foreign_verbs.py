"""Verbs of similar programs, and hints which verb of exo-mesh replaces them."""

from __future__ import annotations

VERB_HINTS = {
    # Ollama
    "create": "models need no preparation: `exo-mesh run MODEL`, with --system and --temperature; "
    "`exo-mesh models add REPO` makes a card",
    "push": "exo-mesh publishes nothing; other peers copy models from this one by themselves",
    "cp": "give a model another name in its card: `exo-mesh models add`; see docs/reference/cards.md",
    "signin": "there is no account; set EXO_MESH_API_KEY to a key of a closed mesh, HF_TOKEN to a token of the hub",
    "signout": "there is no account; `exo-mesh key remove ID` removes a key of the HTTP API",
    # Docker
    "images": "`exo-mesh ls` lists the models on disk",
    "start": "`exo-mesh serve` starts a node, `exo-mesh run MODEL` loads a model and asks it",
    "up": "`exo-mesh serve` starts a node, `exo-mesh demo` starts a small mesh on this machine",
    "down": "`exo-mesh node stop` stops a node, `exo-mesh stop MODEL` unloads a model",
    "kill": "`exo-mesh stop MODEL` unloads a model, `exo-mesh node stop` stops a node, `exo-mesh node kill-all` all",
    "restart": "`exo-mesh node restart` restarts a node",
    "logs": "a node logs to standard error and --log-file; under systemd: `journalctl -u exo-mesh`",
    "exec": "`exo-mesh run MODEL PROMPT` asks a model",
    "inspect": "`exo-mesh show MODEL` describes a model, `exo-mesh status` the mesh",
    "info": "`exo-mesh status` describes the mesh, `exo-mesh doctor` checks this machine",
    "stats": "`exo-mesh top` shows memory, models and requests",
    "login": "`exo-mesh join CODE` joins a closed mesh; `exo-mesh key new` makes a key of the HTTP API",
    "build": "there is nothing to build: `exo-mesh pull MODEL` downloads a model",
    "rmi": "`exo-mesh rm MODEL` deletes the files of a model",
    "network": "`exo-mesh topology` draws peers and links",
    "log": "a node logs to standard error and --log-file; `exo-mesh node log-level` changes how much",
    # MLX
    "mlx.launch": "start `exo-mesh` on each machine, and they find each other; "
    "`mlx.launch --hostfile hosts.json -- exo-mesh` works, too",
    "mlx.distributed_config": "a node finds cables between Macs without a file: `exo-mesh topology` shows them, "
    "`exo-mesh doctor rdma` what is missing; `exo-mesh hostfile FILE` checks a file that there is",
    "distributed_config": "a node finds cables between Macs without a file: `exo-mesh topology` shows them, "
    "`exo-mesh doctor rdma` what is missing; `exo-mesh hostfile FILE` checks a file that there is",
    # LM Studio, llama.cpp, exo, and plain guesses
    "place": "`exo-mesh load MODEL` places a model over peers; `exo-mesh preview MODEL` shows the possible plans",
    "get": "`exo-mesh pull MODEL` downloads a model",
    "download": "`exo-mesh pull MODEL` downloads a model",
    "unload": "`exo-mesh stop MODEL` unloads a model",
    "remove": "`exo-mesh rm MODEL` deletes the files of a model",
    "delete": "`exo-mesh rm MODEL` deletes the files of a model",
    "ask": "`exo-mesh run MODEL PROMPT` asks a model",
    "generate": "`exo-mesh run MODEL PROMPT` asks a model",
    "server": "`exo-mesh serve` starts a node",
    "nodes": "`exo-mesh status` lists the peers",
    "peers": "`exo-mesh status` lists the peers",
    "monitor": "`exo-mesh top` shows the mesh live",
    "tui": "`exo-mesh top` shows the mesh live",
    "dashboard": "`exo-mesh top` shows the mesh live; its web page is http://127.0.0.1:52415",
    "install": "`exo-mesh service install` runs a node as a service of this machine",
    "daemon": "`exo-mesh service install` runs a node as a service of this machine",
    "sleep": "`exo-mesh node sleep` reports to the peers that this machine goes to sleep",
    "update": "`pip install --upgrade exo-mesh`, then `exo-mesh node restart` on one machine after the other",
    "upgrade": "`pip install --upgrade exo-mesh`, then `exo-mesh node restart` on one machine after the other",
    "uninstall": "`exo-mesh drain`, `exo-mesh node stop`, `exo-mesh service uninstall`, then `pip uninstall exo-mesh`; "
    "see docs/tasks/uninstall.md",
    "health": "`exo-mesh status` shows the health of the mesh, `exo-mesh doctor` checks this machine",
    "token": "`exo-mesh key local` prints the local token, `exo-mesh key new` makes a key of the HTTP API",
}
