"""The command `exo-mesh`: finds the verb, runs it, and turns an error into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from exo_mesh.base.printable import reason_of
from exo_mesh.base.telemetry.logs import setup_logging
from exo_mesh.cli import exit_codes
from exo_mesh.cli.model_verbs import MODEL_VERBS, module_of
from exo_mesh.cli.parser import Parser
from exo_mesh.cli.terminal import prepare_streams
from exo_mesh.errors import MeshError
from exo_mesh.settings.config import ConfigError
from exo_mesh.settings.foreign_verbs import VERB_HINTS
from exo_mesh.settings.spelling import did_you_mean

_MODEL_VERBS = {verb: text for verb, (_, text) in MODEL_VERBS.items() if verb != "ls"}

VERB_GROUPS: dict[str, dict[str, str]] = {
    "nodes": {
        "serve": "run a node on this machine; `exo-mesh` without a verb does the same",
        "demo": "start a small mesh on this machine, ask the demo model a question, keep serving",
        "service": "run a node as a service of this machine or user: install, uninstall, status",
        "drain": "let a node finish its requests and accept no new ones",
        "node": "stop or restart a node, set its log level, list or end the processes here",
        "wake": "wake the sleeping machine of a peer with Wake-on-LAN",
    },
    "models": {
        "run": "ask a model or chat with it; a model that no peer has is downloaded first",
        "launch": "start a coding agent that uses the mesh: claude, codex, opencode, aider, …",
        "batch": "run a file of requests in OpenAI's batch format at low priority",
        **_MODEL_VERBS,
        "models": "the same as list; `models add` and `models delete` make and delete model cards",
        "preview": "how a model could be placed: numbered plans for `load`",
        "stop": "unload a model on all peers",
        "explain": "why the prompt of a request was computed again",
        "cache": "list, remove or pin the prompts that this machine keeps on disk",
    },
    "the mesh": {
        "status": "health of this node, its peers and its models",
        "top": "live view of the mesh: peers, models, requests, memory",
        "topology": "peers and links, and which peer holds which layers",
        "ps": "list the models that are loaded",
        "bench": "measure frames, a whole mesh, or the engines",
        "nginx-config": "write the configuration of an nginx in front of all nodes of the live mesh",
    },
    "access": {
        "secret": "make a secret that closes a mesh",
        "invite": "let another machine join this mesh: prints a one-time code for the secret",
        "join": "join a mesh with the code that `invite` printed",
        "key": "make, list and remove keys of the HTTP API",
    },
    "this machine": {
        "doctor": "check this machine: ports, network, firewall, engines, memory, disk, models",
        "engines": "engines installed on this machine, and the engine in use",
        "config": "show the settings and where each value comes from",
        "hostfile": "check a hostfile of mlx.launch and show its ranks",
        "completion": "print a completion script for bash, zsh or fish",
        "version": "versions of the package, the protocol and the libraries",
    },
}
"""Help by verb, by subject: as `exo-mesh --help` shows them. The module of a verb is exo_mesh.cli.verbs.<verb>, with _
for -; MODEL_VERBS are in `models` there."""

VERBS = {verb: text for group in VERB_GROUPS.values() for verb, text in group.items()} | {
    "chat": "the same as run",
    "ls": MODEL_VERBS["ls"][1],
}

UNLISTED = ("complete",)
"""Verbs that only programs use, such as completion scripts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    prepare_streams()
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except MeshError as exc:
        return _complain(exc, exit_codes.of_error(exc))
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        # the reader of our output (`| head`) has gone: without this, Python reports an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.OK
    except UnicodeError as exc:  # a path that the locale's encoding cannot spell, bytes that are no text, …
        return _complain(exc, exit_codes.FAILED)
    except OSError as exc:  # a full disk, a directory without write permission, …
        return _complain(exc, exit_codes.FAILED)


def _dispatch(argv: list[str]) -> int:
    if argv[:1] == ["help"] and len(argv) > 1 and not argv[1].startswith("-"):
        argv = [*argv[1:], "--help"]
    if argv and argv[0] in ("-h", "--help", "help"):
        print(usage())
        return exit_codes.OK
    if argv and argv[0] in ("-V", "--version"):
        argv = ["version", *argv[1:]]
    is_implied = not argv or argv[0].startswith("-")
    if is_implied:
        argv = ["serve", *argv]
    verb, *rest = argv
    if verb not in VERBS and verb not in UNLISTED:
        if hint := VERB_HINTS.get(verb):
            raise ConfigError(f"there is no verb {verb}: {hint}")
        raise ConfigError(f"no such verb: {verb}{did_you_mean(verb, VERBS) or '; see exo-mesh --help'}")
    module = importlib.import_module(module_of(verb))
    parser = Parser(prog=f"exo-mesh {verb}", description=module.__doc__)
    module.add_arguments(parser)
    if is_implied:
        parser.verbs = list(VERBS)
    args = parser.parse_all(rest)
    setup_logging(level="error")  # `serve` sets logging up again from its settings
    code: int = module.run(args)
    return code


def usage() -> str:
    """The text of `exo-mesh --help`."""
    groups = (
        "\n".join([f"{title}:", *(f"  {verb:12} {text}" for verb, text in verbs.items())])
        for title, verbs in VERB_GROUPS.items()
    )
    verbs = "\n".join(groups)
    return (
        "usage: exo-mesh [VERB] [flags]\n\n"
        "Runs one language model over the machines that you own: start `exo-mesh` on each of them.\n\n"
        f"{verbs}\n\n"
        "`exo-mesh VERB --help` lists the flags of a verb; `exo-mesh serve --help` lists all settings of a node."
    )


def _complain(error: Exception, code: int) -> int:
    from exo_mesh.cli.tables import complain

    complain(reason_of(error))
    return code


if __name__ == "__main__":
    sys.exit(main())
