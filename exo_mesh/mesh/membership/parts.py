"""Wires the parts of a node that share keys and settings with all its peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exo_mesh.mesh.membership.key_sharing import KeySharing
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.mesh.membership.setting_sharing import SettingSharing
from exo_mesh.settings.config import Settings


@dataclass(frozen=True, slots=True)
class SharingParts:
    """keys: the HTTP API keys. settings: the settings in force here, of which the mesh shares some."""

    keys: KeySharing
    settings: SettingSharing

    @staticmethod
    def at(settings: Settings, origins: Mapping[str, str] | None, membership: Membership) -> SharingParts:
        """origins: where the settings came from, as of LoadedSettings."""
        return SharingParts(KeySharing.at(settings, membership), SettingSharing.at(settings, origins, membership))
