"""Stores ended traces in files, so that they survive a restart of the node, and deletes old ones."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from pathlib import Path

from exo_mesh.errors import TransportError
from exo_mesh.machine.disk import Disk
from exo_mesh.node.inspection.trace_formats import trace_from_json, trace_to_json
from exo_mesh.rings.serving.traces import MAX_TRACES, RequestTrace, TraceStore

SWEEP_S = 3600.0
"""Interval of the check for old traces."""

DAY_S = 86_400.0

MAX_FILE_BYTES = 4 * 2**20
"""A larger trace is kept in memory only. With MAX_TRACES this limits the directory's size."""

_log = logging.getLogger(__name__)


class TraceKeeper:
    """Syncs a directory with the store: one file for each ended trace. max_age_s: None keeps traces until newer ones
    replace them."""

    def __init__(self, store: TraceStore, directory: Path, disk: Disk, max_age_s: float | None) -> None:
        self._store = store
        self._directory = directory
        self._disk = disk
        self._max_age_s = max_age_s
        self._names: set[str] = set()

    async def keep(self) -> None:
        """Restores the traces of earlier starts, then writes and deletes files until cancelled."""
        found, self._names = await asyncio.to_thread(self._read)
        self._store.restore(found)
        while True:
            if self._max_age_s is not None:
                self._store.forget_older(self._max_age_s)
            while await self.sync():
                continue  # again, since the store may have changed meanwhile
            await self._store.changed.wait(SWEEP_S)

    async def sync(self) -> bool:
        """Writes missing files and deletes surplus ones; returns whether there were any."""
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
        """Reads the traces on disk, oldest first, and the names of their files. Deletes files that are not valid
        traces."""
        found = {}
        for path in sorted(self._directory.glob("*.json"))[: 4 * MAX_TRACES]:
            try:
                trace = trace_from_json(path.read_bytes())
            except (OSError, TransportError) as exc:
                _log.warning("deleted %s, which is not a valid trace: %s", path.name, exc)
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            found[path.name] = trace
        return sorted(found.values(), key=lambda trace: trace.entered), set(found)


def _file_name(trace: RequestTrace) -> str:
    """A file name from a hash: clients choose trace ids, so the ids are not safe as names."""
    identity = f"{trace.key_id} {trace.trace_id} {trace.request_id} {trace.entered}"
    return f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
