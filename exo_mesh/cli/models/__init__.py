"""Models of the mesh: list, pull, show, rm and search, which are also verbs of their own; add and delete cards.

Without another word it lists the models that some peer has.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

from exo_mesh.cli.model_verbs import MODEL_VERBS, module_of
from exo_mesh.cli.models import cards, listing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subparser per verb; the flags of `list` for the verb without another word."""
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
    """Run the verb that was chosen."""
    verb: Callable[[argparse.Namespace], int] = getattr(args, "verb", listing.run)
    return verb(args)


def _keep_flags_before(part: argparse.ArgumentParser) -> None:
    """`models --json list` is `models list --json`: argparse would put the default of the second over the first."""
    for action in part._actions:
        if action.dest in ("all", "api_url", "home", "json"):
            action.default = argparse.SUPPRESS
