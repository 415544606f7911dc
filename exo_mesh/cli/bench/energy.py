"""Computes the energy per token from the nodes' counters before and after a run.

docs/reference/power.md has the formula.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

SETTLE_S = 4.0
"""Wait after a run until all nodes have closed its last window of measurement (rings/hosting/ring_energy.py)."""

_RING = "exo_mesh_ring_energy_"


class EnergyCounters(msgspec.Struct, frozen=True):
    """Energy counters of all rings whose drivers run on the nodes read.

    is_measured: all of these nodes measure the energy of their machines. joules, tokens: by kind, prompt or output.
    """

    is_measured: bool = False
    joules: dict[str, float] = msgspec.field(default_factory=dict)
    tokens: dict[str, float] = msgspec.field(default_factory=dict)
    prompts: float = 0.0


def read_energy(texts: Iterable[str]) -> EnergyCounters:
    """Sums the energy counters of several nodes. texts: GET /metrics of each node."""
    measured, joules, tokens, prompts = [], {}, {}, 0.0  # type: ignore[var-annotated]
    for text in texts:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        measured.append(any(sample.name == "exo_mesh_energy_joules_total" for sample in samples))
        for sample in samples:
            kind = sample.labels.get("kind", "")
            if sample.name == f"{_RING}joules_total":
                joules[kind] = joules.get(kind, 0.0) + sample.value
            elif sample.name == f"{_RING}tokens_total":
                tokens[kind] = tokens.get(kind, 0.0) + sample.value
            elif sample.name == f"{_RING}prompts_total":
                prompts += sample.value
    return EnergyCounters(bool(measured) and all(measured), joules, tokens, prompts)


def energy_per_token(before: EnergyCounters, after: EnergyCounters) -> dict[str, Any] | None:
    """Joules of a run, in all, per prompt and per token; None without measured energy. Kinds without tokens are
    absent."""
    joules = {kind: value - before.joules.get(kind, 0.0) for kind, value in after.joules.items()}
    tokens = {kind: value - before.tokens.get(kind, 0.0) for kind, value in after.tokens.items()}
    if sum(joules.values()) <= 0:
        return None
    figures = {"joules": round(sum(joules.values()), 2)}
    if (prompts := after.prompts - before.prompts) > 0:
        figures["joules_per_prompt"] = round(joules.get("prompt", 0.0) / prompts, 4)
    for kind in ("prompt", "output"):
        if tokens.get(kind, 0.0) > 0:
            figures[f"joules_per_{kind}_token"] = round(joules[kind] / tokens[kind], 5)
    return figures
