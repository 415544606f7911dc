"""Shares settings with all peers through a record of the view, and saves them in a file for the next start.

Every peer merges all published tables into its own. The live peer with the lowest id publishes the result; another peer
publishes its own table only while the first one lacks an entry of it. So a mesh usually has one such record.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.wakeups import until_wakeup
from exo_mesh.domain.shared_settings import MAX_COUNTER, MAX_SETTINGS, SharedSetting, SharedSettings
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.settings.effective import SHARED, EffectiveSettings

FILE_NAME = "mesh_settings.json"
MAX_FILE_BYTES = 1 << 20
LOOK_EVERY_S = 1.0
PATIENCE_S = 2.0
"""How long the first peer may lack an entry before this one publishes it. Usually it has received it and publishes it
at once."""

_log = logging.getLogger(__name__)


class SettingSharing:
    """The settings in force at a node of a mesh. path: the file that stores the shared settings."""

    def __init__(
        self,
        effective: EffectiveSettings,
        membership: Membership,
        path: Path,
        clock: Clock = monotonic,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.effective = effective
        self._membership = membership
        self._path = path
        self._clock = clock
        self._patience_s = patience_s
        self._table = _read(path).only(SHARED)
        self._saved = self._table
        self._published: SharedSettings | None = None
        self._seen = -1
        self._tables: dict[str, SharedSettings] = {}
        self._lacking_since: float | None = None
        self._saving = asyncio.Lock()
        self._apply()

    @property
    def shared_texts(self) -> Mapping[str, str]:
        """The shared settings as text, in the form of environment variables."""
        return self._table.texts

    async def change(self, texts: Mapping[str, str | None]) -> None:
        """Change settings on every peer and save them; None removes a setting."""
        self._look()
        self._take(self._table.changed(texts, self._membership.own.id))
        self._publish(self._table)
        _log.info("shared settings changed here: %s", ", ".join(texts))
        await self._save()

    async def keep(self) -> None:
        """Until cancelled: merge what peers share, and publish what they lack."""
        while True:
            self._look()
            self._settle()
            await self._save()
            await self._membership.changed.wait(until_wakeup(LOOK_EVERY_S))

    def _look(self) -> None:
        """Merge the tables that the records of peers have now."""
        view = self._membership.view
        if self._seen != view.settings_version:
            self._seen = view.settings_version
            self._tables = {owner: table.only(SHARED) for owner, table in view.shared_settings()}
            self._take(self._table.merged(*self._tables.values()))

    def _take(self, table: SharedSettings) -> None:
        if table != self._table:
            self._table = table
            self._apply()

    def _apply(self) -> None:
        unusable = self.effective.take(self._table.texts)
        if unusable:
            _log.warning("ignoring shared settings that this version cannot use: %s", ", ".join(unusable))

    def _settle(self) -> None:
        """Publish the table, or withdraw it because the first peer has all of it."""
        own_id = self._membership.own.id
        first = min([own_id, *(peer.id for peer in self._membership.peers)])
        if first == own_id:
            self._publish(self._table if self._table.entries else None)
            return
        known = self._tables.get(first, SharedSettings())
        if known.merged(self._table) == known:
            self._lacking_since = None
            self._publish(None)
            return
        now = self._clock()
        self._lacking_since = now if self._lacking_since is None else self._lacking_since
        if now - self._lacking_since >= self._patience_s:
            self._publish(self._table)

    def _publish(self, table: SharedSettings | None) -> None:
        if table != self._published:
            self._published = table
            self._membership.put_shared_settings(table)

    async def _save(self) -> None:
        async with self._saving:
            table = self._table
            if table == self._saved:
                return
            try:
                await asyncio.to_thread(_write, self._path, table)
            except OSError as exc:
                _log.warning("cannot save the shared settings, so a restart may lose them: %s", exc)
            self._saved = table


def _write(path: Path, table: SharedSettings) -> None:
    """Replace the file. Raises OSError."""
    entries = {one.name: {"text": one.text, "counter": one.counter, "by": one.author} for one in table.entries}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(entries, file, indent=1)
    draft.replace(path)


def _read(path: Path) -> SharedSettings:
    """The table in the file; an empty one if the file is missing or invalid."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_FILE_BYTES))
        return SharedSettings.of(_entry(name, said) for name, said in list(found.items())[:MAX_SETTINGS])
    except FileNotFoundError:
        return SharedSettings()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        _log.warning("cannot read %s (%s); the mesh will send its shared settings again", path, type(exc).__name__)
        return SharedSettings()


def _entry(name: str, said: Mapping[str, Any]) -> SharedSetting:
    text, counter, author = said["text"], said["counter"], said["by"]
    if not (text is None or isinstance(text, str)) or not isinstance(author, str):
        raise TypeError("text and by must be strings")
    if not 0 < int(counter) <= MAX_COUNTER:
        raise ValueError("counter is out of range")
    return SharedSetting(name, text, int(counter), author)
