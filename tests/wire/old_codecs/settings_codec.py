"""Converts shared settings to protobuf and back."""

from __future__ import annotations

from exo_mesh.domain.shared.settings import (
    MAX_COUNTER,
    MAX_SETTINGS,
    MAX_TEXT_BYTES,
    SharedSetting,
    SharedSettings,
)
from exo_mesh.errors import TransportError
from exo_mesh.wire.proto import control_pb2 as pb

MAX_NAME = 64
"""Most characters of a name, and of an author's id."""


def settings_to_proto(table: SharedSettings) -> pb.SharedSettings:
    return pb.SharedSettings(
        settings=[
            pb.SharedSetting(
                name=entry.name,
                text=(entry.text or "").encode(),
                removed=entry.text is None,
                counter=entry.counter,
                author=entry.author,
            )
            for entry in table.entries
        ]
    )


def settings_from_proto(message: pb.SharedSettings) -> SharedSettings:
    """Raises TransportError for a table that no peer of any version would send."""
    if len(message.settings) > MAX_SETTINGS:
        raise TransportError(f"a peer sent {len(message.settings)} shared settings; at most {MAX_SETTINGS} are allowed")
    return SharedSettings.of(map(_entry, message.settings))


def _entry(message: pb.SharedSetting) -> SharedSetting:
    sizes_fit = len(message.name) <= MAX_NAME >= len(message.author) and len(message.text) <= MAX_TEXT_BYTES
    if not sizes_fit or not 0 < message.counter <= MAX_COUNTER:
        raise TransportError("a peer sent a shared setting that is too long, or whose counter is out of range")
    try:
        text = None if message.removed else message.text.decode()
    except UnicodeDecodeError as exc:
        raise TransportError("a peer sent a shared setting that is not UTF-8 text") from exc
    return SharedSetting(message.name, text, message.counter, message.author)
