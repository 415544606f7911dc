"""Which parameters a lazy result depends on, from MLX's own graph: what will be read when it is evaluated."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

import mlx.core as mx

_USED = re.compile(r'"p(\d+)" ->')


def reached(results: list[mx.array], parameters: Mapping[str, mx.array]) -> set[str]:
    """Names of the parameters from which some unevaluated result is computed. Computes nothing."""
    labels = {f"p{i}": array for i, array in enumerate(parameters.values())}
    graph = io.StringIO()
    mx.export_to_dot(graph, *results, **labels)
    used = {int(number) for number in _USED.findall(graph.getvalue())}
    return {name for i, name in enumerate(parameters) if i in used}
