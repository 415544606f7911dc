"""The table of all settings of a node, read from the annotated fields of `config.Settings`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from exo_mesh.settings.config import Settings
from exo_mesh.settings.setting import Setting, setting_of


def _declared() -> Iterator[Setting]:
    """The settings in the order of their fields. A field without a declaration is no setting."""
    for field, hint in Settings.__annotations__.items():
        if metadata := getattr(hint, "__metadata__", ()):
            declaration, text = metadata
            yield setting_of(field, declaration, hint.__origin__, text)


SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _declared()}
"""Every setting by name, in the order in which `exo-mesh serve --help` and docs show them."""

GROUPS: dict[str, list[Setting]] = {}
"""The settings by subject, in the same order."""
for _setting in SETTINGS.values():
    GROUPS.setdefault(_setting.group, []).append(_setting)
