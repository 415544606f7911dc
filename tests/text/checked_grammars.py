"""Checks a grammar here, as a renderer process does it."""

from __future__ import annotations

from functools import partial

from exo_mesh.base.deep_stack import in_deep_stack
from exo_mesh.domain.request import GrammarSpec
from exo_mesh.text.grammars import check_in_this_stack


def check_grammar(spec: GrammarSpec, param: str = "response_format") -> None:
    """Raises InputError as `TemplateRenderer.check_grammar` does."""
    in_deep_stack(partial(check_in_this_stack, spec, param))
