"""`exo-mesh`: finds the verb, runs it, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from exo_mesh.cli import exit_codes
from exo_mesh.cli.model_verbs import MODEL_VERBS, module_of
from exo_mesh.cli.parser import Parser
from exo_mesh.errors import MeshError
from exo_mesh.settings.config import ConfigError, did_you_mean
from exo_mesh.settings.foreign_verbs import VERB_HINTS
from exo_mesh.telemetry.logs import setup_logging

VERBS = {
    "serve": "run a node on this machine (what exo-mesh alone does)",
    "demo": "start a small local mesh with the demo model, ask it something, keep serving",
    "run": "ask a model, or talk with it; a hub id that no peer has is fetched first",
    "status": "health of this node, its peers and models",
    "topology": "peers, and who holds which layers",
    "preview": "how a model could be placed, with the arithmetic",
    "ps": "model instances that are loaded",
    "top": "the mesh, its models, requests and memory, live",
    "models": "the same as list; `models add` and `models delete` make and delete model cards",
    "engines": "engines installed here, and which one is chosen",
    "bench": "measure the ring, or the engines",
    "stop": "stop a model instance everywhere",
    "node": "stop or restart a node, this one or another; log level; list and end processes",
    "wake": "wake the machine of a peer that sleeps, by Wake-on-LAN",
    "drain": "let a node finish what it has and take nothing new",
    "nginx-config": "the configuration of an nginx in front of all nodes, from the live mesh",
    "service": "run a node as a service of this machine or of yours: install, uninstall, status",
    "doctor": "check this machine: ports, network, firewall, engines, memory, disk, models",
    "hostfile": "check a hostfile of mlx.launch and show its ranks",
    "secret": "make a secret that closes a mesh",
    "invite": "let another machine join this mesh: a one-time code for its secret",
    "join": "join a mesh with the code that `invite` printed",
    "key": "make, list and remove keys of the HTTP API",
    "config": "show the settings and where each came from",
    "completion": "print a completion script for bash, zsh or fish",
    "version": "versions of the package, the protocol and the libraries",
}
"""Each verb is the module exo_mesh.cli.<verb>, with _ for -; those of MODEL_VERBS are in exo_mesh.cli.models."""


VERB_GROUPS = {
    "nodes": ("serve", "demo", "service", "drain", "node", "wake"),
    "models": ("run", "pull", "list", "show", "rm", "search", "models", "preview", "stop"),
    "the mesh": ("status", "top", "topology", "ps", "bench", "nginx-config"),
    "access": ("secret", "invite", "join", "key"),
    "this machine": ("doctor", "engines", "config", "hostfile", "completion", "version"),
}
"""The verbs by subject, in the order in which `exo-mesh --help` shows them; `ls` is left out, since it is `list`."""

UNLISTED = ("complete",)
"""Verbs for programs: completion scripts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the answer is the exit code."""
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except MeshError as exc:
        return _complain(exc, exit_codes.of_error(exc))
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        # the reader of our output (`| head`) has gone; keep Python from complaining about it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.OK
    except OSError as exc:  # a full disk, a directory that may not be written, …
        return _complain(exc, exit_codes.FAILED)


def _dispatch(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help", "help"):
        print(usage())
        return exit_codes.OK
    if argv and argv[0] in ("-V", "--version"):
        argv = ["version", *argv[1:]]
    if not argv or argv[0].startswith("-"):
        argv = ["serve", *argv]
    verb, *rest = argv
    if verb not in (known := [*VERBS, *MODEL_VERBS]) and verb not in UNLISTED:
        if hint := VERB_HINTS.get(verb):
            raise ConfigError(f"there is no verb {verb}: {hint}")
        raise ConfigError(f"no such verb: {verb}{did_you_mean(verb, known) or '; see exo-mesh --help'}")
    module = importlib.import_module(module_of(verb))
    parser = Parser(prog=f"exo-mesh {verb}", description=module.__doc__)
    module.add_arguments(parser)
    args = parser.parse_all(rest)
    setup_logging(level="error")  # `serve` sets it up again, as its settings say
    code: int = module.run(args)
    return code


def usage() -> str:
    """The text of `exo-mesh --help`."""
    texts = VERBS | {verb: text for verb, (_, text) in MODEL_VERBS.items()}
    groups = (
        "\n".join([f"{title}:", *(f"  {verb:12} {texts[verb]}" for verb in verbs)])
        for title, verbs in VERB_GROUPS.items()
    )
    verbs = "\n".join(groups)
    return (
        "usage: exo-mesh [VERB] [flags]\n\n"
        "Runs one language model over the machines you already own: start `exo-mesh` on each of them.\n\n"
        f"{verbs}\n\n"
        "`exo-mesh VERB --help` lists the flags of a verb; `exo-mesh serve --help` those of a node."
    )


def _complain(error: Exception, code: int) -> int:
    print(f"exo-mesh: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
