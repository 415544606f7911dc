"""Draws `exo-mesh top` into a given number of columns and rows. Pure: the clock is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from exo_mesh.base.telemetry.tables import human_bytes
from exo_mesh.cli.verbs.top.live_data import LiveData
from exo_mesh.cli.verbs.top.sections import LEVELS, Cell, Column, Section, TableRow, seconds, sections

GAP = 2
_BLOCKS = " ▁▂▃▄▅▆▇█"
MAX_REASONS = 3
KEYS = "q quit   p pause   Tab table   ↑↓ scroll   ←→ sort by   r reverse"
MIN_SHRUNK = 8
"""Minimum width of a column whose texts may be cut."""


@dataclass
class Look:
    """The state that keys change.

    focus: the number of the table that the arrows change. offsets, sort_by, descending: by name of the table; sort_by
    -1 keeps the order of the rows.
    """

    focus: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    sort_by: dict[str, int] = field(default_factory=dict)
    descending: dict[str, bool] = field(default_factory=dict)
    is_paused: bool = False

    def press(self, key: str, tables: Sequence[Section]) -> None:
        """Handles a key; unknown ones do nothing."""
        if key == "p":
            self.is_paused = not self.is_paused
        if not tables:
            return
        self.focus %= len(tables)
        table = tables[self.focus]
        offset, column = self.offsets.get(table.name, 0), self.sort_by.get(table.name, -1)
        match key:
            case "tab":
                self.focus = (self.focus + 1) % len(tables)
            case "down" | "j":
                self.offsets[table.name] = min(offset + 1, max(0, len(table.rows) - 1))
            case "up" | "k":
                self.offsets[table.name] = max(0, offset - 1)
            case "right" | "s":
                self.sort_by[table.name] = (column + 2) % (len(table.columns) + 1) - 1
            case "left":
                self.sort_by[table.name] = (
                    column % (len(table.columns) + 1) - 1 if column >= 0 else len(table.columns) - 1
                )
            case "r":
                self.descending[table.name] = not self.descending.get(table.name, False)


def drawn(data: LiveData, look: Look, width: int, height: int | None, clock: str) -> list[Text]:
    """Draws the lines of the screen, none longer than width. height: the number of lines; None for no limit."""
    head = [_title(data, look, clock), *_facts(data, width), *_reasons(data)]
    tables = sections(data, width)
    foot = [] if height is None else [Text(KEYS, style="dim")]
    room = None if height is None else max(0, height - len(head) - len(foot) - 2 * len(tables))
    wanted = [max(1, len(table.rows)) for table in tables]
    given = wanted if room is None else shares(wanted, room)
    lines = head
    for number, (table, num_rows) in enumerate(zip(tables, given, strict=True)):
        is_focused = height is not None and number == look.focus % len(tables)
        lines += _table(table, look, width, num_rows, is_focused=is_focused)
    if height is not None:
        lines = lines[: height - 1]
        lines += [Text("")] * (height - 1 - len(lines)) + foot
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def shares(wanted: Sequence[int], room: int) -> list[int]:
    """Divides `room` rows by max-min fairness: small tables get all they want, the others equal shares."""
    given = [0] * len(wanted)
    while room > 0 and (open_ones := [index for index, want in enumerate(wanted) if given[index] < want]):
        for index in open_ones[:room]:
            given[index] += 1
        room -= min(room, len(open_ones))
    return given


def _title(data: LiveData, look: Look, clock: str) -> Text:
    document = data.document
    health = document.get("health", {})
    node = document.get("peers", {}).get(document.get("node_id", ""), {}).get("name", "")
    line = Text("exo-mesh top", style="bold")
    if document:
        status, level = health.get("status", "?"), health.get("level", "ok")
        line.append(f"  {node}", style="not bold").append(f"  peers: {len(document['peers'])}  ", style="not bold")
        line.append(status, style=f"not bold {LEVELS.get(level, 'red')}")
    how = "paused" if look.is_paused else data.source
    line.append(f"  {how}", style="not bold yellow" if how != "live" else "not bold dim")
    return line.append(f"  {clock}", style="not bold dim")


def _facts(data: LiveData, width: int) -> list[Text]:
    lines = [Text(data.note, style="yellow")] if data.note else []
    if not data.document:
        return lines
    queue, stats, memory = (data.document.get(key) or {} for key in ("queue", "requests", "memory"))
    total = stats.get("total", 0)
    parts = [
        f"requests: {queue.get('in_progress', 0)} running, {queue.get('waiting', 0)}/{queue.get('max', 0)} waiting",
        f"{total} ended", f"{100 * stats.get('error_rate', 0):.1f} % errors",
    ]  # fmt: skip
    if total:
        latency, first = stats.get("latency_s") or {}, stats.get("ttft_s") or {}
        speed = stats.get("avg_tokens_per_s") or 0.0
        parts += [f"{speed:.1f} tokens/s", f"p50 {seconds(latency.get('p50'))}", f"p95 {seconds(latency.get('p95'))}"]
        parts += [f"first token {seconds(first.get('p50'))}"]
    return [*lines, *_wrapped(parts, width), *([_memory(memory, data.curve, width)] if memory else [])]


def _wrapped(parts: Sequence[str], width: int) -> list[Text]:
    """Joins the parts with commas into lines no longer than width."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 > width:
            lines[-1] += ","
            lines.append(f"  {part}")
        else:
            lines[-1] += f", {part}"
    return [Text(line) for line in lines]


def _memory(memory: dict[str, Any], curve: Sequence[float], width: int) -> Text:
    """Draws the free memory of this node and the curve of its pressure."""
    level = LEVELS.get(memory.get("level", "ok"), "red")
    free, total = human_bytes(memory.get("available_bytes", 0)), human_bytes(memory.get("total_bytes", 0))
    text = f"memory here: {memory.get('pressure_pct', 0):.0f} % used, {free} of {total} free "
    room = max(0, min(len(curve), width - len(text) - 1))
    return Text(text).append(sparkline(curve[len(curve) - room :]), style=level)


def sparkline(percents: Sequence[float]) -> str:
    """Draws one block character per value from 0 to 100."""
    return "".join(_BLOCKS[min(8, max(0, round(value * 8 / 100)))] for value in percents)


def _reasons(data: LiveData) -> list[Text]:
    """Draws the problems of the mesh and their remedies."""
    health = data.document.get("health", {})
    found = {reason["message"]: ("", reason) for reason in health.get("reasons", ())}
    for where in (*health.get("peer_health", ()), *health.get("instance_health", ())):
        for reason in where["reasons"]:
            found.setdefault(reason["message"], (f"{where.get('name') or where['id']}: ", reason))
    lines = []
    for where, reason in list(found.values())[:MAX_REASONS]:
        remedy = f" -> {reason['remedy']}" if reason.get("remedy") else ""
        level = reason.get("level", "degraded")
        style = "dim" if level == "ok" else LEVELS.get(level, "red")
        lines.append(Text(f"{where}{reason['message']}{remedy}", style=style))
    return lines


def _table(table: Section, look: Look, width: int, num_rows: int, *, is_focused: bool) -> list[Text]:
    """Draws the range of rows if not all are shown, the header, and at most num_rows rows."""
    column = look.sort_by.get(table.name, -1)
    rows = table.sorted_rows(column, descending=look.descending.get(table.name, False))
    offset = min(look.offsets.get(table.name, 0), max(0, len(rows) - num_rows))
    shown = rows[offset : offset + num_rows]
    kept = columns_that_fit(table.columns, rows, width)
    widths = _widths(table.columns, kept, rows, width)
    part = f"rows {offset + 1} to {offset + len(shown)} of {len(rows)}" if 0 < len(shown) < len(rows) else ""
    lines = [Text(part, style="dim"), _header(table, kept, widths, column, is_focused=is_focused)]
    if not rows and table.empty and num_rows:
        lines.append(Text(table.empty, style="dim"))
    return lines + [_line([row.cells[index] for index in kept], kept, table.columns, widths) for row in shown]


def _header(table: Section, kept: Sequence[int], widths: Sequence[int], sorted_by: int, *, is_focused: bool) -> Text:
    titles: list[Cell] = [
        Text(table.columns[index].title, style="underline" if index == sorted_by else "") for index in kept
    ]
    line = _line(titles, kept, table.columns, widths)
    line.stylize("bold" if is_focused else "dim")
    return line


def _line(cells: Sequence[Cell], kept: Sequence[int], columns: Sequence[Column], widths: Sequence[int]) -> Text:
    line = Text()
    for number, (cell, index, width) in enumerate(zip(cells, kept, widths, strict=True)):
        part = cell.copy() if isinstance(cell, Text) else Text(cell)
        part.truncate(width, overflow="ellipsis")
        if columns[index].right:
            part.pad_left(width - part.cell_len)
        elif number < len(kept) - 1:
            part.pad_right(width - part.cell_len)
        line.append(" " * GAP if number else "").append_text(part)
    return line


def columns_that_fit(columns: Sequence[Column], rows: Sequence[TableRow], width: int) -> list[int]:
    """The numbers of the columns to show: drops the least needed ones until the rest fits."""
    kept = list(range(len(columns)))
    while True:
        natural = {index: _natural(columns, index, rows) for index in kept}
        least = [min(MIN_SHRUNK, wide) if columns[index].may_shrink else wide for index, wide in natural.items()]
        spare = [index for index in kept if columns[index].need]
        if sum(least) + GAP * (len(kept) - 1) <= width or not spare:
            return kept
        kept.remove(max(spare, key=lambda index: columns[index].need))


def _widths(columns: Sequence[Column], kept: Sequence[int], rows: Sequence[TableRow], width: int) -> list[int]:
    """Natural widths of the columns; while they are too wide, the widest column that may shrink loses a cell."""
    widths = [_natural(columns, index, rows) for index in kept]
    soft = [number for number, index in enumerate(kept) if columns[index].may_shrink]
    excess = sum(widths) + GAP * (len(kept) - 1) - width
    while excess > 0 and soft:
        widest = max(soft, key=lambda number: widths[number])
        if widths[widest] <= 1:
            break
        widths[widest] -= 1
        excess -= 1
    return widths


def _natural(columns: Sequence[Column], index: int, rows: Sequence[TableRow]) -> int:
    cells = (row.cells[index] for row in rows)
    lengths = (cell.cell_len if isinstance(cell, Text) else Text(cell).cell_len for cell in cells)
    return max(len(columns[index].title), *lengths, 0)
