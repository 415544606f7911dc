"""Manage the models of the mesh: list, pull, show, rm and search (which are also verbs), and add and delete for cards.

Without a subcommand it lists the models that some peer has.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

from exo_mesh.cli.model_verbs import MODEL_VERBS, module_of
from exo_mesh.cli.verbs.models import cards, listing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a subparser for each verb, and the flags of `list` for `models` alone."""
    listing.add_arguments(parser)
    subparsers = parser.add_subparsers(dest="what", metavar="WHAT")
    for verb, (_, text) in MODEL_VERBS.items():
        module = importlib.import_module(module_of(verb))
        part = subparsers.add_parser(verb, help=text, description=module.__doc__)
        module.add_arguments(part)
        part.set_defaults(verb=module.run)
    cards.add_parsers(subparsers)
    for part in subparsers.choices.values():
        _keep_flags_before(part)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen verb; `list` if there is none."""
    verb: Callable[[argparse.Namespace], int] = getattr(args, "verb", listing.run)
    return verb(args)


def _keep_flags_before(part: argparse.ArgumentParser) -> None:
    """Makes `models --json list` equal `models list --json`: argparse would overwrite the first flag with a default."""
    for action in part._actions:
        if action.dest in ("all", "api_url", "home", "json"):
            action.default = argparse.SUPPRESS
