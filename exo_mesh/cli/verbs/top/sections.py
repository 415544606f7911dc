"""Makes the tables of `exo-mesh top` from the live document: peers, models, links, downloads and requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from rich.text import Text

from exo_mesh.base.telemetry.tables import human_bytes
from exo_mesh.cli.stage_colours import stage_colour
from exo_mesh.cli.tables import layers_text, peer_names
from exo_mesh.cli.topology_picture import goodput_text, memory_bar
from exo_mesh.cli.verbs.models.bars import percent
from exo_mesh.cli.verbs.models.facts import span
from exo_mesh.cli.verbs.top.live_data import LiveData

LEVELS = {"ok": "green", "degraded": "yellow", "failed": "red"}
STATES = {"ready": "green", "loading": "yellow", "failed": "red", "ongoing": "cyan", "pending": "yellow"}
STATUSES = {"ok": "green", "error": "red", "timeout": "yellow"}
NARROW_BAR, WIDE_BAR = 10, 24
WIDE = 120
"""Screen width in columns from which the longer bars are used."""

Cell = Text | str
Rank = float | str


class Column(msgspec.Struct, frozen=True):
    """A column of a table.

    need: 0 = always shown; a narrow screen drops the column with the highest number first. right: align right.
    may_shrink: texts may be cut.
    """

    title: str
    need: int = 0
    right: bool = False
    may_shrink: bool = False


class TableRow(msgspec.Struct, frozen=True):
    """A row of a table. ranks: the sort keys, one for each column."""

    cells: tuple[Cell, ...]
    ranks: tuple[Rank, ...]


class Section(msgspec.Struct, frozen=True):
    """A table. empty: the text if it has no rows."""

    name: str
    columns: tuple[Column, ...]
    rows: Sequence[TableRow]
    empty: str = ""

    def sorted_rows(self, column: int, *, descending: bool) -> list[TableRow]:
        """The rows sorted by a column; -1 keeps their order."""
        if column < 0:
            return list(self.rows)
        return sorted(self.rows, key=lambda row: _comparable(row.ranks[column]), reverse=descending)


def sections(data: LiveData, width: int) -> list[Section]:
    """Makes all tables for a screen of this width."""
    document = data.document
    if not document:
        return []
    names = peer_names({"view": {"peers": list(document["peers"].values())}})
    made = [_peers(document, names, width), _models(document, names, data.rates)]
    if links := list(document.get("links", {}).values()):
        made.append(_links(links, names, document.get("time")))
    if downloads := [one for one in document["downloads"].values() if one["state"] != "completed"]:
        made.append(_downloads(downloads, names))
    return [*made, _requests(data.requests)]


def _peers(document: Mapping[str, Any], names: Mapping[str, str], width: int) -> Section:
    measured = [column for column in _MEASURED if any(_measured(peer, column) for peer in document["peers"].values())]
    columns = (
        Column("PEER", may_shrink=True), Column("HEALTH"), Column("ROLE", 4), Column("ENGINE", 2), Column("MEMORY"),
        Column("FREE", right=True), Column("HELD", 3, right=True), Column("LOAD", 1, right=True),
        *(Column(title, 5, right=True) for title in measured), Column("ADDRESS", 4, may_shrink=True),
    )  # fmt: skip
    health = document.get("health", {})
    levels = {one["id"]: one["level"] for one in health.get("peer_health", ())}
    rows = []
    for peer_id, peer in sorted(document["peers"].items(), key=lambda item: names[item[0]]):
        here = " *" if peer_id == document["node_id"] else ""
        rows.append(_peer_row(names[peer_id] + here, levels.get(peer_id, "ok"), peer, width, measured))
    for gone in health.get("peer_health", ()):
        if gone["id"] not in document["peers"]:
            asleep = any(reason["code"] == "asleep" for reason in gone["reasons"])
            state = "asleep" if asleep else gone["level"]
            cells = (
                gone["name"],
                Text(state, "dim" if asleep else STATES.get(state, "red")),
                *[""] * (len(columns) - 2),
            )
            rows.append(TableRow(cells, (gone["name"], state, *[0.0] * (len(columns) - 2))))
    return Section("PEERS", columns, rows)


_MEASURED = {"GPU": "%", "POWER": "W", "HEAT": "°C"}
"""Units of the columns that are shown only if a peer reports the value."""


def _measured(peer: Mapping[str, Any], column: str) -> float | None:
    """The value of a measured column: use of the busiest GPU or NPU in %, power in W, hottest sensor in °C; or None."""
    if column != "GPU":
        return peer.get("power_w" if column == "POWER" else "temperature_c")
    accelerators = (peer.get("hardware") or {}).get("accelerators", ())
    shares = [one["utilization"] for one in accelerators if one.get("utilization") is not None]
    return 100 * max(shares) if shares else None


def _peer_row(name: str, level: str, peer: Mapping[str, Any], width: int, measured: Sequence[str]) -> TableRow:
    engine = next((device["engine"] for device in peer.get("devices") or () if device["engine"]), "none")
    free, held, load = (peer.get(key) for key in ("usable_bytes", "reserved_bytes", "load"))
    bar: Cell = "?"
    if free is not None and held is not None:
        reading = {"usable_bytes": free, "reserved_bytes": held, "total_bytes": peer.get("total_bytes") or 0}
        bar = memory_bar(reading, WIDE_BAR if width >= WIDE else NARROW_BAR)
    url, role = peer.get("api_url") or "", peer.get("role") or "full"
    figures = [_measured(peer, column) for column in measured]
    texts = [
        "-" if one is None else f"{one:.0f} {_MEASURED[column]}" for one, column in zip(figures, measured, strict=True)
    ]
    cells = (
        name, Text(level, LEVELS.get(level, "red")), role, engine, bar, _bytes(free), _bytes(held),
        "?" if load is None else f"{load:.2f}", *texts, url.partition("//")[2],
    )  # fmt: skip
    ranks = (
        name,
        level,
        role,
        engine,
        -(free or 0),
        free or 0,
        held or 0,
        load or 0,
        *(one or 0.0 for one in figures),
        url,
    )
    return TableRow(cells, ranks)


def _models(document: Mapping[str, Any], names: Mapping[str, str], rates: Mapping[str, float]) -> Section:
    columns = (
        Column("MODEL", may_shrink=True), Column("STATE"), Column("TOKENS/S", right=True), Column("RUN", 2, right=True),
        Column("RING", may_shrink=True),
    )  # fmt: skip
    running = {one["instance"]: one["running"] for one in document.get("queue", {}).get("instances", ())}
    rows = []
    for _, one in sorted(document["instances"].items()):
        rate = rates.get(one["id"], 0.0)
        state = Text(one["state"], STATES.get(one["state"], ""))
        ring = _ring(one["stages"], names).append(f": {one['reason']}" if one.get("reason") else "")
        count = running.get(one["id"])
        cells = (one["model"], state, f"{rate:.1f}" if rate else "-", "-" if count is None else str(count), ring)
        rows.append(TableRow(cells, (one["model"], one["state"], rate, count or 0, ring.plain)))
    return Section("MODELS", columns, rows, "no model is loaded; exo-mesh run MODEL loads one")


def _ring(stages: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> Text:
    """The ring in words: `alpha 0-5 → beta + gamma 6-11`, each stage in its colour."""
    ring = Text()
    for index, stage in enumerate(stages):
        members = stage["group"]["peers"] if stage.get("group") else [stage["peer"]]
        text = f"{' + '.join(names.get(one, one[:8]) for one in members)} {layers_text(stage['layers'])}"
        ring.append(" → " if index else "").append(text, style=stage_colour(index))
    return ring


def _links(links: Iterable[Mapping[str, Any]], names: Mapping[str, str], now: float | None) -> Section:
    columns = (
        Column("LINK", may_shrink=True), Column("KIND", 1, may_shrink=True), Column("ROUND TRIP", right=True),
        Column("GOODPUT", right=True),
    )  # fmt: skip
    rows = []
    for one in links:
        ends = " → ".join(names.get(one[end], one[end][:8]) for end in ("from", "to"))
        kinds = ", ".join(dict.fromkeys(path["kind"] for path in one.get("paths") or () if path.get("kind"))) or "-"
        rtt, goodput = one.get("rtt_ms"), one.get("mb_per_s")
        cells = (
            ends, kinds, "?" if rtt is None else f"{rtt:.2f} ms", goodput_text(one, now),
        )  # fmt: skip
        rows.append(TableRow(cells, (ends, kinds, rtt or 0.0, goodput or 0.0)))
    return Section("LINKS", columns, sorted(rows, key=lambda row: row.ranks[0]))


def _downloads(downloads: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> Section:
    columns = (
        Column("DOWNLOAD", may_shrink=True), Column("PEER", may_shrink=True), Column("STATE"),
        Column("DONE", right=True), Column("OF", right=True), Column("SPEED", 1, right=True),
        Column("LEFT", right=True),
    )  # fmt: skip
    rows = []
    for one in downloads:
        peer, share = names.get(one["peer"], one["peer"][:8]), percent(one)
        cells = (
            one["model"], peer, Text(one["state"], STATES.get(one["state"], "")), f"{share} %",
            _bytes(one["total_bytes"]), f"{_bytes(one['bytes_per_s'])}/s",
            span(one["eta_s"]) if one["eta_s"] >= 1 else "-",
        )  # fmt: skip
        total, speed = one["total_bytes"], one["bytes_per_s"]
        rows.append(TableRow(cells, (one["model"], peer, one["state"], share, total, speed, one["eta_s"])))
    return Section("DOWNLOADS", columns, rows)


def _requests(requests: Iterable[Mapping[str, Any]]) -> Section:
    columns = (
        Column("ENDED"), Column("REQUEST OF", may_shrink=True), Column("OUTCOME", may_shrink=True),
        Column("PROMPT", 2, right=True), Column("TOKENS", right=True), Column("FIRST", 1, right=True),
        Column("TOOK", right=True), Column("TOKENS/S", right=True),
    )  # fmt: skip
    rows = []
    for one in requests:
        ended = datetime.fromtimestamp(one["ended_at"]).strftime("%H:%M:%S")
        speed = one["tokens_per_s"]
        cells = (
            ended, one["model"], Text(one["outcome"], STATUSES.get(one["status"], "red")), str(one["prompt_tokens"]),
            str(one["output_tokens"]), seconds(one["ttft_s"]), seconds(one["duration_s"]),
            f"{speed:.1f}" if speed else "-",
        )  # fmt: skip
        ranks = (
            one["ended_at"], one["model"], one["outcome"], one["prompt_tokens"], one["output_tokens"],
            one["ttft_s"] or 0.0, one["duration_s"], speed or 0.0,
        )  # fmt: skip
        rows.append(TableRow(cells, ranks))
    return Section("REQUESTS", columns, rows, "no request has ended on this node yet")


def seconds(value: float | None) -> str:
    """A duration such as `0.21 s` or `12 s`; `-` if there is none."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _bytes(value: float | None) -> str:
    return "?" if value is None else human_bytes(value)


def _comparable(rank: Rank) -> tuple[bool, float, str]:
    return (True, 0.0, rank.lower()) if isinstance(rank, str) else (False, rank, "")
