"""The live data of the page: one document about the mesh, and its changes. A page gets the document once, and then only
the changes, as JSON merge patches (RFC 7396)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from exo_mesh.api.sse import data_frame
from exo_mesh.node.observation import Observation

PEER_FIELDS = (
    "id",
    "name",
    "role",
    "version",
    "api_url",
    "addresses",
    "devices",
    "models",
    "partial_models",
    "fetches",
    "served",
)
TELEMETRY_FIELDS = (
    "usable_bytes", "total_bytes", "reserved_bytes", "load", "tokens", "frames", "temperature_c", "power_w",
    "hardware", "draining",
)  # fmt: skip


def live_document(observation: Observation, now: float) -> dict[str, Any]:
    """The document with all data that can change. Peers, instances, links and downloads are stored by key, so that
    patches are small."""
    state = msgspec.to_builtins(observation.state())
    view, telemetry = state["view"], state["telemetry"]
    return {
        "time": round(now, 3),
        "node_id": state["node_id"],
        "peers": {peer["id"]: _peer(peer, telemetry.get(peer["id"], {})) for peer in view["peers"]},
        "instances": {one["id"]: one for one in view["instances"]},
        "links": {f"{link['from']} {link['to']}": link for link in _links(state)},
        "cables": state["cables"],
        "downloads": {f"{one['peer']} {one['model']}": one for one in view["downloads"]},
        "stages_here": state["stages_here"],
        "health": state["health"],
        "queue": msgspec.to_builtins(observation.queue()),
        "requests": observation.request_stats(),
        "memory": observation.memory(whole_mesh=False),
    }


def _links(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one link for each pair of peers: the links in the state, then the measured hops of all other pairs."""
    hops = [{"from": peer_id, **hop} for peer_id, reading in state["telemetry"].items() for hop in reading["hops"]]
    shown: set[frozenset[str]] = set()
    for link in (*state["links"], *hops):
        pair = frozenset((link["from"], link["to"]))
        if pair not in shown:
            shown.add(pair)
            yield link


def _peer(peer: Mapping[str, Any], reading: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: peer.get(name) for name in PEER_FIELDS}
    return {**shown, **{name: reading.get(name) for name in TELEMETRY_FIELDS}}


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The patch that turns old into new; {} if nothing has changed. A value of None means that the key is absent."""
    patch: dict[str, Any] = dict.fromkeys(old.keys() - new.keys())
    for name, value in new.items():
        before = old.get(name)
        if value == before:
            continue
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        patch[name] = merge_patch(before, value) if both else value  # type: ignore[arg-type]
    return patch


class LiveFeed:
    """Computes a node's document and patches for all pages together: at most once per interval, and only if a page
    asks.

    It has no task of its own. The first page that asks after an interval computes the next patch, and the other pages
    get the same bytes.
    """

    def __init__(self, make: Callable[[], dict[str, Any]], interval_s: float, clock: Callable[[], float]) -> None:
        self._make = make
        self._clock = clock
        self._interval_s = interval_s
        self._made_at = float("-inf")
        self._document: dict[str, Any] = {}
        self._patch = b""
        self.number = 0

    @property
    def soonest_s(self) -> float:
        """Least time between two documents, even if the view changes more often."""
        return self._interval_s / 4

    def refresh(self, *, has_changed: bool = False) -> None:
        """Compute the document again if it is older than 75 % of the interval; if has_changed, than `soonest_s`."""
        now = self._clock()
        if now - self._made_at < (self.soonest_s if has_changed else 0.75 * self._interval_s):
            return
        before, self._document = self._document, self._make()
        self._made_at = now
        self.number += 1
        patch = merge_patch(before, self._document)
        self._patch = data_frame({"type": "patch", "number": self.number, "data": patch})

    def frame(self, seen: int) -> bytes:
        """The event for a page that has the document with the number `seen`: a patch; the whole document if the page is
        further behind; b"" if the page is up to date."""
        if seen == self.number:
            return b""
        if seen == self.number - 1 and seen > 0:
            return self._patch
        return data_frame({"type": "document", "number": self.number, "data": self._document})
