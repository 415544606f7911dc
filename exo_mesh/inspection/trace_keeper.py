"""Keeps ended traces in files, so that they survive a restart of the node, and deletes those that are too old."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from pathlib import Path

from exo_mesh.errors import TransportError
from exo_mesh.inspection.trace_formats import trace_from_json, trace_to_json
from exo_mesh.machine.disk import Disk
from exo_mesh.serving.traces import MAX_TRACES, RequestTrace, TraceStore

SWEEP_S = 3600.0
"""How often is looked for traces that have become too old."""

DAY_S = 86_400.0

MAX_FILE_BYTES = 4 * 2**20
"""A longer trace is kept in memory only. With MAX_TRACES this bounds the directory."""

_log = logging.getLogger(__name__)


class TraceKeeper:
    """The directory holds what the store holds: a file for each trace that has ended. max_age_s: None keeps them until
    newer ones need their place."""

    def __init__(self, store: TraceStore, directory: Path, disk: Disk, max_age_s: float | None) -> None:
        self._store = store
        self._directory = directory
        self._disk = disk
        self._max_age_s = max_age_s
        self._names: set[str] = set()

    async def keep(self) -> None:
        """Read the traces of earlier starts, then write and delete files until cancelled."""
        found, self._names = await asyncio.to_thread(self._read)
        self._store.restore(found)
        while True:
            if self._max_age_s is not None:
                self._store.forget_older(self._max_age_s)
            while await self.sync():
                continue  # the store may have changed meanwhile
            await self._store.changed.wait(SWEEP_S)

    async def sync(self) -> bool:
        """Make the files those of the store; False if they were."""
        wanted = {_file_name(trace): trace for trace in self._store.all() if trace.has_ended}
        missing, gone = wanted.keys() - self._names, self._names - wanted.keys()
        self._names = set(wanted)
        if missing or gone:
            await asyncio.to_thread(self._write, [wanted[name] for name in missing], gone)
        return bool(missing or gone)

    def _write(self, traces: list[RequestTrace], gone: set[str]) -> None:
        for name in gone:
            with contextlib.suppress(OSError):
                (self._directory / name).unlink()
        for trace in traces:
            text = trace_to_json(trace).decode()
            if len(text) <= MAX_FILE_BYTES:
                self._disk.write(self._directory / _file_name(trace), text, "a trace")

    def _read(self) -> tuple[list[RequestTrace], set[str]]:
        """The traces on disk, oldest first, and the names of their files. What is no trace of ours is deleted."""
        found = {}
        for path in sorted(self._directory.glob("*.json"))[: 4 * MAX_TRACES]:
            try:
                trace = trace_from_json(path.read_bytes())
            except (OSError, TransportError) as exc:
                _log.warning("%s is dropped: it cannot be read as a trace: %s", path.name, exc)
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            found[path.name] = trace
        return sorted(found.values(), key=lambda trace: trace.entered), set(found)


def _file_name(trace: RequestTrace) -> str:
    """Clients choose trace ids, so they are no file names."""
    told = f"{trace.key_id} {trace.trace_id} {trace.request_id} {trace.entered}"
    return f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.json"
