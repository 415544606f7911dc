"""The settings in force at a node: its own, and those shared by the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from exo_mesh.base.printable import quoted
from exo_mesh.domain.shared_settings import MAX_TEXT_BYTES
from exo_mesh.errors import InputError
from exo_mesh.settings.config import Settings
from exo_mesh.settings.spelling import did_you_mean
from exo_mesh.settings.table import SETTINGS

SHARED = tuple(name for name, setting in SETTINGS.items() if setting.shared)
"""Settings that the mesh may share. They take effect without a restart. None of them opens access, names a file or
lets code run, because in an open mesh any peer may change them."""

_NOT_OF_THE_MESH = ("flag", "environment")
"""Prefixes of origins that win over the mesh."""


class EffectiveSettings:
    """A node's own settings, overridden by the mesh's. origins: as in LoadedSettings.

    Flags > EXO_MESH_* environment > the mesh > config.toml > defaults.
    """

    def __init__(
        self,
        own: Settings,
        origins: Mapping[str, str] | None = None,
        on_change: Callable[[Settings], object] = lambda settings: None,
    ) -> None:
        """on_change: called with the settings in force when they change."""
        self.own = own
        self.now = own
        """The settings in force."""
        self._origins = origins or {}
        self._from_mesh: frozenset[str] = frozenset()
        self._on_change = on_change

    def origin(self, name: str) -> str:
        """The origin of the value in force: "mesh", or as in LoadedSettings."""
        return "mesh" if name in self._from_mesh else self._origins.get(name, "default")

    def take(self, texts: Mapping[str, str]) -> list[str]:
        """Replaces the settings of the mesh; returns the names that are invalid here."""
        fields: dict[str, Any] = {}
        names, unusable = set(), []
        for name, text in texts.items():
            if self._origins.get(name, "").startswith(_NOT_OF_THE_MESH):
                continue
            try:
                fields[SETTINGS[name].field] = shared_value(name, text)
                names.add(name)
            except InputError:
                unusable.append(name)
        was = self.now
        self.now, self._from_mesh = replace(self.own, **fields), frozenset(names)
        if self.now != was:
            self._on_change(self.now)
        return unusable


class SettingsDesk(Protocol):
    """Reads and changes the settings in force and those of the mesh."""

    effective: EffectiveSettings

    @property
    def shared_texts(self) -> Mapping[str, str]:
        """The settings of the mesh by name, as texts in the form of environment variables."""

    async def change(self, texts: Mapping[str, str | None]) -> None:
        """Changes settings of the mesh at every peer; None removes one. The caller has checked the texts."""


class LoneSettings:
    """Settings of a node without a mesh, in memory only; also for tests."""

    def __init__(self, effective: EffectiveSettings) -> None:
        self.effective = effective
        self.shared_texts: dict[str, str] = {}

    async def change(self, texts: Mapping[str, str | None]) -> None:
        joined = {**self.shared_texts, **texts}
        self.shared_texts = {name: text for name, text in joined.items() if text is not None}
        self.effective.take(self.shared_texts)


def shared_value(name: str, text: str) -> Any:
    """Parses a shared setting. Raises InputError that names the setting."""
    if name not in SHARED:
        if name in SETTINGS:
            setting = SETTINGS[name]
            message = (
                f"{name} is a setting of each node: use {setting.flag}, {setting.variable} or config.toml there, "
                "and restart the node"
            )
        else:
            message = f"there is no setting {quoted(name)}{did_you_mean(name, SHARED)}"
        raise InputError(message, param=name)
    if len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise InputError(f"{name}: a shared setting may have at most {MAX_TEXT_BYTES} bytes", param=name)
    if name == "default_model" and text.startswith(("/", "~")):
        raise InputError(
            "default_model: a path is valid on one machine only; the mesh needs the name of a model", param=name
        )
    try:
        return SETTINGS[name].from_texts([text])
    except ValueError as exc:
        raise InputError(f"{name}: {exc}, not {quoted(text, 80)}", param=name) from exc


def shared_text(name: str, raw: object) -> str | None:
    """Converts a JSON value of a shared setting to the text of a variable; null (None) stays None. Raises
    InputError."""
    if raw is None:
        if name not in SHARED:
            shared_value(name, "")
        return None
    text = str(raw).lower() if isinstance(raw, bool) else str(raw)
    shared_value(name, text)
    return text
