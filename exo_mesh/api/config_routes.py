"""Handlers for the configuration: this node's settings with their origin, and the settings that the mesh shares.

No reply contains a secret. Only admins see paths, addresses and the system prompt.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import PurePath
from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from exo_mesh.api.access import CALLER
from exo_mesh.api.body import read_as, read_body, run_apart
from exo_mesh.api.context import ApiContext
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.errors import json_response
from exo_mesh.errors import InputError
from exo_mesh.security.api_keys import Role
from exo_mesh.settings.config import default_settings
from exo_mesh.settings.effective import SHARED, shared_text
from exo_mesh.settings.setting import Setting
from exo_mesh.settings.table import SETTINGS

MAX_BODY_BYTES = 64 << 10

_SECRET_KEY = re.compile(r"key|token|secret|password|credential|auth", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
HIDDEN = "***"


class HubTokenBody(msgspec.Struct, kw_only=True):
    """The part of PUT /config that is no setting: this node's token for the hub; null removes it."""

    hf_token: str | UnsetType | None = UNSET


SharedSettingsBody: type[HubTokenBody] = msgspec.defstruct(  # type: ignore[assignment]  # its bases say so
    "SharedSettingsBody",
    [(name, SETTINGS[name].toml[-1] | str | UnsetType | None, UNSET) for name in SHARED],
    bases=(HubTokenBody,),
    kw_only=True,
)
"""PUT /config: settings of the mesh, each as its own type or as text. null resets a setting; a missing field leaves it
unchanged."""


class LoggingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """PUT /v1/logging. level: null goes back to the level of the settings."""

    level: Literal["debug", "info", "warning", "error"] | None


class ConfigRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._observation = context.services.observation
        self._desk = context.options.config
        self._file = context.options.config_file
        self._hub_token = context.options.hub_token
        self._logs = context.options.logs
        self._body_silence_s = context.options.body_silence_s

    async def config(self, request: web.Request) -> web.Response:
        """GET /config"""
        is_admin = request[CALLER].role is Role.ADMIN
        effective, defaults = self._desk.effective, default_settings()
        settings = [
            {
                "name": name,
                "value": _shown(setting, setting.text(effective.now)) if is_admin or not setting.is_private else None,
                "default": setting.text(defaults) if not setting.default_words else "",
                "origin": _origin(effective.origin(name), is_admin=is_admin),
                "shared": name in SHARED,
                "choices": list(setting.words),
                "switch": setting.is_switch,
                "help": setting.help,
            }
            for name, setting in SETTINGS.items()
        ]
        texts, token = self._desk.shared_texts, self._hub_token
        identity = self._observation.identity()
        found = {
            "object": "config",
            "node": {"id": identity["node_id"], "name": identity["name"]},
            "config_file": self._file if is_admin else PurePath(self._file).name,
            "mesh": {name: texts[name] for name in texts if is_admin or not SETTINGS[name].is_private},
            "hf_token": {"is_set": bool(token and token.origin), "origin": token.origin if token else ""},
            "settings": settings,
        }
        return json_response(found)

    async def logging(self, request: web.Request) -> web.Response:
        """GET /v1/logging: only admins see the path of the log file."""
        found = self._logs.describe()
        if request[CALLER].role is not Role.ADMIN:
            found["file"] = PurePath(found["file"]).name
        return json_response({"object": "logging", **found})

    async def set_level(self, request: web.Request) -> web.Response:
        """PUT /v1/logging: set the level of this node now; it overrides flags and the mesh. PUT /config sets the level
        of the whole mesh."""
        body = await read_as(request, self._body_silence_s, partial(decode_body, kind=LoggingBody))
        self._logs.set_own(body.level)
        return await self.logging(request)

    async def change(self, request: web.Request) -> web.Response:
        """PUT /config: change shared settings; every peer applies the change and keeps it for its next start."""
        raw = await read_body(request, self._body_silence_s)
        body = await run_apart(request, lambda: decode_body(raw, dict[str, Any]))
        shared = {name: value for name, value in body.items() if name != "hf_token"}
        texts = {name: shared_text(name, value) for name, value in shared.items() if not isinstance(value, dict | list)}
        # the error names a field with a value of the wrong type
        checked = await run_apart(request, lambda: decode_body(raw, SharedSettingsBody))
        if checked.hf_token is not UNSET:
            if self._hub_token is None:
                raise InputError("hf_token: this node does not download from a hub", param="hf_token")
            await self._hub_token.change(checked.hf_token or "")
        if texts:
            await self._desk.change(texts)
        return await self.config(request)


def _shown(setting: Setting, text: str) -> str:
    """The text of a setting with all possible secrets removed."""
    if setting.is_mapping:
        items = (item.partition("=") for item in text.split(setting.separator) if item)
        shown = ((key, HIDDEN if setting.secret or _SECRET_KEY.search(key) else value) for key, _, value in items)
        return setting.separator.join(f"{key}={value}" for key, value in shown)
    return _USER_IN_URL.sub("", text)


def _origin(origin: str, *, is_admin: bool) -> str:
    """The origin of a setting; only admins see the directory of config.toml."""
    path, colon, key = origin.rpartition(":")
    return origin if is_admin or not colon else f"{PurePath(path).name}:{key}"
