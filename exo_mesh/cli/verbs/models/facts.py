"""Turns the API's facts about models into words for people."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from exo_mesh.base.printable import counted
from exo_mesh.base.telemetry.tables import human_bytes
from exo_mesh.cli.tables import layers_text, peer_names
from exo_mesh.domain.download import DownloadState

UNFINISHED = tuple(state for state in DownloadState if state.is_active)


def model_path(name: str) -> str:
    """The name of a model, quoted for a path of the API."""
    return urllib.parse.quote(name, safe="/:@")


def size_text(num_bytes: int, estimated_bytes: int = 0) -> str:
    """The size; with `~` if only an estimate is known, `?` if nothing is."""
    if num_bytes:
        return human_bytes(num_bytes)
    return f"~{human_bytes(estimated_bytes)}" if estimated_bytes else "?"


def is_served(model: Mapping[str, Any]) -> bool:
    """Whether only a model server has the model: nothing of it is in the mesh."""
    return bool(model.get("served_by")) and not model["num_bytes"]


def memory_bytes(num_bytes: int, model: Mapping[str, Any]) -> int:
    """The part of a size that must be in memory: tables of which a token reads a few rows stay on disk."""
    return max(0, num_bytes - int(model.get("disk_bytes", 0)))


def context_text(model: Mapping[str, Any]) -> str:
    """The context length, such as `40960`, or `?`."""
    return str(model.get("context_length") or "?")


def quantisation(model: Mapping[str, Any]) -> str:
    """The quantisation, such as `4bit` or `fp8`; of a model without one, the dtype of its weights."""
    return str(model.get("quantization") or model.get("dtype") or "?")


def holders(model: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """The peers that have the model: `alpha, beta`; `-` if none."""
    return ", ".join(names.get(peer, peer[:8]) for peer in model["peers"]) or "-"


def unverified(model: Mapping[str, Any], state: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """The peers that have parts of a model which they have not compared with its digests, as one text; or nothing."""
    ids = [peer["id"] for peer in state["view"]["peers"] if model["id"] in peer.get("unverified", ())]
    peers = ", ".join(sorted(names.get(peer_id, peer_id[:8]) for peer_id in ids))
    return [f"on {peers}: not yet compared with the digests of the files"] if peers else []


def held_layers(model: Mapping[str, Any], state: Mapping[str, Any], downloads: Iterable[Mapping[str, Any]]) -> str:
    """The layers that peers have: `all`, or if some have only a part, `alpha 0-13, beta all`."""
    names = peer_names(dict(state))
    partial = {peer["id"] for peer in state["view"]["peers"] if model["id"] in peer.get("partial_models", ())}
    layers = {
        entry["peer_id"]: layers_text(entry["layers"])
        for entry in downloads
        if entry["model"] == model["id"] and entry["layers"][1] > entry["layers"][0] and entry["state"] != "failed"
    }
    if partial.isdisjoint(model["peers"]):
        return "all" if model["peers"] else f"0/{model['num_layers']}" if model.get("num_layers") else "-"
    parts = [(peer, layers.get(peer, "a part") if peer in partial else "all") for peer in model["peers"]]
    return ", ".join(f"{names.get(peer, peer[:8])} {part}" for peer, part in parts)


def fit_text(num_bytes: int, state: Mapping[str, Any], estimated_bytes: int = 0, name: str = "") -> str:
    """Whether the weights alone, by their size or else an estimate, fit the memory that peers have free now, on how few
    of them; if not, the numbers. name: of the model; peers that say that none of their engines runs it do not count.

    `exo-mesh show` and `exo-mesh preview` also count KV, overhead, engines and cuts.
    """
    needed = num_bytes or estimated_bytes
    if not needed:
        return "?"
    peers = state["view"]["peers"]
    live = {peer["id"] for peer in peers if peer.get("model_engines", {}).get(name) != []}
    if peers and not live:
        return "no: no engine of the peers runs it"
    usable = sorted((r["usable_bytes"] for peer, r in state["telemetry"].items() if peer in live), reverse=True)
    for count in range(1, len(usable) + 1):
        if sum(usable[:count]) >= needed:
            return f"yes, {counted(count, 'peer')}"
    return f"no: {size_text(num_bytes, estimated_bytes)} of weights, {human_bytes(sum(usable))} usable"


def previewed_fit(previews: Sequence[Mapping[str, Any]]) -> str:
    """`yes: 1 peer, context 4096 tokens`, or `no` with the reason."""
    for entry in previews:
        if "refused" not in entry:
            width = counted(entry["width"], "peer")
            return f"yes: {width}, context {entry['context_limit']} tokens"
    return f"no: {previews[-1]['refused']['message']}" if previews else "no"


def ago(then: float | None, now: float) -> str:
    """`3 h ago`; `-` if the time is unknown."""
    return "-" if then is None else f"{span(max(0.0, now - then))} ago"


def span(seconds: float) -> str:
    """A duration such as `12 s`, `3 min`, `2 h`, `5 d`."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def input_modalities(model: dict[str, Any]) -> str:
    """What the messages of a model may contain: "text, image"; "?" if no peer knows it."""
    modalities = (model.get("capabilities") or {}).get("modalities") or {}
    return ", ".join(modalities.get("input") or ()) or "?"
