"""The verbs of `exo-mesh models` that also work alone: `exo-mesh pull` is `exo-mesh models pull`."""

from __future__ import annotations

MODEL_VERBS = {
    "pull": ("pull", "download a model to the peers that would hold it"),
    "load": ("loading", "place a model over peers, and wait until it is ready"),
    "list": ("listing", "models on the peers' disks: size, peers, layers, whether they fit"),
    "ls": ("listing", "the same as list"),
    "show": ("show", "one model, on a peer or on the hub: size, peers, whether it fits"),
    "rm": ("remove", "delete the files of a model"),
    "search": ("search", "search the hub for models, and see whether each fits"),
}
"""(module in exo_mesh.cli.verbs.models, help) of each verb."""

_ALIASES = {"chat": "run"}
"""Other names of verbs."""


def module_of(verb: str) -> str:
    """The name of the module that runs a verb of the command line."""
    return (
        f"exo_mesh.cli.verbs.models.{MODEL_VERBS[verb][0]}"
        if verb in MODEL_VERBS
        else f"exo_mesh.cli.verbs.{_ALIASES.get(verb, verb).replace('-', '_')}"
    )
