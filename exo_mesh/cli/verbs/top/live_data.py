"""The data of `exo-mesh top`: the live document of a node, and rates derived from earlier ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MAX_CURVE = 240
"""Most readings of memory that are kept."""
_MIN_SPAN_S, _MAX_SPAN_S = 0.5, 30.0
"""Limits of the time between two documents for a rate to be computed."""


def patched(target: Any, patch: Any) -> Any:
    """Applies a JSON merge patch (RFC 7396); returns a new document."""
    if not isinstance(patch, Mapping):
        return patch
    made = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = patched(made.get(name), value)
    return made


@dataclass
class LiveData:
    """The data on the screen.

    document: from `GET /metrics/snapshot`. rates: tokens per second by instance. curve: memory pressure in percent, the
    newest last. requests: the last ones of this node. source: "live", "snapshots", "snapshot" or "connecting".
    """

    document: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)
    requests: Sequence[Mapping[str, Any]] = ()
    url: str = ""
    source: str = "connecting"
    note: str = ""

    def copy(self) -> LiveData:
        """A shallow copy; the parts are never changed in place."""
        return replace(self)

    def take(self, document: dict[str, Any]) -> None:
        """Takes the next document, of this node or of another one, and updates rates and curve."""
        before, self.document = self.document, document
        span_s = document["time"] - before["time"] if before else 0.0
        if _MIN_SPAN_S < span_s < _MAX_SPAN_S:
            earlier, later = tokens_of(before), tokens_of(document)
            self.rates = {name: max(0, total - earlier.get(name, total)) / span_s for name, total in later.items()}
        pressure = (document.get("memory") or {}).get("pressure_pct")
        if before.get("node_id") != document["node_id"]:
            self.curve = []
        if (pressure is not None and span_s != 0.0) or not before:
            self.curve = [*self.curve, pressure or 0.0][-MAX_CURVE:]


def tokens_of(document: Mapping[str, Any]) -> dict[str, int]:
    """Tokens sampled so far by instance, as the drivers report."""
    totals: dict[str, int] = {}
    for peer in document.get("peers", {}).values():
        for name, count in (peer.get("tokens") or {}).items():
            totals[name] = max(count, totals.get(name, 0))
    return totals
