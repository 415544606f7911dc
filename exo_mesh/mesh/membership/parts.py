"""Wires the parts of a node that share keys and settings with all its peers."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.mesh.membership.key_sharing import KeySharing
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.mesh.membership.setting_sharing import FILE_NAME, SettingSharing
from exo_mesh.settings.config import Settings
from exo_mesh.settings.effective import EffectiveSettings


@dataclass(frozen=True, slots=True)
class SharingParts:
    """keys: the HTTP API keys. settings: the settings in force here, of which the mesh shares some."""

    keys: KeySharing
    settings: SettingSharing

    @staticmethod
    def at(settings: Settings, effective: EffectiveSettings, membership: Membership) -> SharingParts:
        return SharingParts(
            KeySharing.at(settings, membership), SettingSharing(effective, membership, settings.home / FILE_NAME)
        )
