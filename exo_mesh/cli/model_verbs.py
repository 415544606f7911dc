"""The verbs around models that are also verbs of their own: `exo-mesh pull` is `exo-mesh models pull`."""

from __future__ import annotations

MODEL_VERBS = {
    "pull": ("pull", "fetch a model to the peers that would hold it"),
    "list": ("listing", "models that peers have: size, peers, layers, whether they fit"),
    "ls": ("listing", "the same as list"),
    "show": ("show", "one model, also of the hub: size, peers, whether it fits"),
    "rm": ("remove", "delete the files of a model"),
    "search": ("search", "search the hub for models; says whether each fits"),
}
"""(module in exo_mesh.cli.models, help) of each verb."""


def module_of(verb: str) -> str:
    """The module of any verb of the command line."""
    return (
        f"exo_mesh.cli.models.{MODEL_VERBS[verb][0]}"
        if verb in MODEL_VERBS
        else f"exo_mesh.cli.{verb.replace('-', '_')}"
    )
