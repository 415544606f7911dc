"""Shows downloads: one progress bar per peer in a terminal, else a line for every 10 %."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from exo_mesh.base.printable import printable
from exo_mesh.base.telemetry.tables import human_bytes
from exo_mesh.cli.tables import layers_text
from exo_mesh.cli.verbs.models.facts import span
from exo_mesh.domain.download import DownloadState

STEP_PERCENT = 10
"""Without a terminal, one line per peer is printed for each of these steps."""

Download = Mapping[str, Any]


class Bars:
    """Shows the progress of downloads. Not thread-safe: call it from one thread at a time."""

    def __init__(self, stream: TextIO, *, keeps: bool) -> None:
        """keeps: leave the bars on the screen after `close`."""
        self._stream = stream
        self._keeps = keeps
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}
        self._printed: dict[str, tuple[str, int]] = {}

    def show(self, downloads: Iterable[Download], phase: str = "") -> None:
        """Shows the current state. phase: what else is in progress, such as `loading 3/8`; shown in a terminal only."""
        downloads = list(downloads)
        if not self._stream.isatty():
            for entry in downloads:
                self._print_line(entry)
            return
        if downloads or phase:
            self._draw(downloads, phase)

    def close(self) -> None:
        """Stops drawing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print_line(self, entry: Download) -> None:
        if entry["state"] == DownloadState.PENDING and not entry["total_bytes"]:
            return
        step = percent(entry) // STEP_PERCENT
        if self._printed.get(_key(entry)) != (entry["state"], step):
            self._printed[_key(entry)] = entry["state"], step
            print(f"{label(entry)}: {printable(figures(entry))}", file=self._stream, flush=True)

    def _draw(self, downloads: list[Download], phase: str) -> None:
        progress = self._started()
        rows = {_key(entry): (label(entry), entry["done_bytes"], entry["total_bytes"]) for entry in downloads}
        texts = {_key(entry): figures(entry) for entry in downloads}
        if phase:
            rows[""] = row = phase_row(phase)
            texts[""] = f"{100 * row[1] // row[2]} %" if row[2] else ""
        for key in self._tasks.keys() - rows.keys():
            progress.update(self._tasks[key], visible=False)
        for key, (text, done, total) in rows.items():
            if key not in self._tasks:
                self._tasks[key] = progress.add_task(text, total=None, figures="")
            progress.update(
                self._tasks[key],
                description=text,
                completed=done,
                total=total or None,
                figures=texts.get(key, ""),
                visible=True,
            )

    def _started(self) -> Any:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

            console = Console(file=self._stream, highlight=False)
            texts = [TextColumn("{task.description}", markup=False), TextColumn("{task.fields[figures]}", markup=False)]
            columns = [SpinnerColumn(finished_text=" "), texts[0], BarColumn(), texts[1]]
            self._progress = Progress(*columns, console=console, transient=not self._keeps, refresh_per_second=8)
            self._progress.start()
        return self._progress


def percent(entry: Download) -> int:
    return 100 * entry["done_bytes"] // entry["total_bytes"] if entry["total_bytes"] else 0


def label(entry: Download) -> str:
    """`alpha: Qwen/Qwen3-0.6B, layers 0-13`."""
    start, stop = entry["layers"]
    part = f", layers {layers_text((start, stop))}" if stop > start and not entry["is_whole"] else ""
    return printable(f"{entry['peer_name'] or entry['peer_id'][:8]}: {entry['model']}{part}")


def figures(entry: Download) -> str:
    """`40 % of 1.2 GB, 25.0 MB/s, 12 s left`, or how the download ended."""
    total = human_bytes(entry["total_bytes"])
    match entry["state"]:
        case DownloadState.COMPLETED if not entry["total_bytes"]:
            return "complete already"
        case DownloadState.COMPLETED:
            hub, peers = human_bytes(entry["from_hub_bytes"]), human_bytes(entry["from_peers_bytes"])
            return f"{total}, done ({hub} from the hub, {peers} from peers)"
        case DownloadState.FAILED:
            return f"failed: {entry['reason']}"
        case DownloadState.PENDING:
            return f"waiting ({total})" if entry["total_bytes"] else "waiting"
    speed = f", {human_bytes(entry['bytes_per_s'])}/s" if entry["bytes_per_s"] else ""
    left = f", {span(entry['eta_s'])} left" if entry["eta_s"] >= 1 else ""
    return f"{percent(entry)} % of {total}{speed}{left}"


def _key(entry: Download) -> str:
    return f"{entry['peer_id']} {entry['model']}"


def phase_row(phase: str) -> tuple[str, int, int]:
    """(text, done, total) of a stream comment such as `loading 3/8`, `queued 2` or `prefill 40 %`; 0, 0 if unknown."""
    if found := re.fullmatch(r"(\w+) (\d+)/(\d+)", phase):
        return found[1], int(found[2]), int(found[3])
    if found := re.fullmatch(r"(\w+) (\d+) %", phase):
        return found[1], int(found[2]), 100
    return phase, 0, 0
