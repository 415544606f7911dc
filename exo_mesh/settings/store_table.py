"""Reads the table [model_store] of config.toml, an alternative form of the settings of the model store."""

from __future__ import annotations

from typing import Any

from exo_mesh.base.printable import quoted

_KEYS = {
    "enabled": "no_store",
    "host": "store_host",
    "path": "store",
    "allow_hub_fallback": "no_store_fallback",
    "allow_hf_fallback": "no_store_fallback",
    "staging.cleanup_on_deactivate": "no_store_cleanup",
    "staging.keep_recent_gb": "store_keep_gb",
    "staging.staging_keep_recent_gb": "store_keep_gb",
}
"""By key of the table: the key of config.toml. A `no_…` key has the opposite value."""


def store_keys(table: Any) -> dict[str, Any]:
    """Converts the table to keys of config.toml. Raises ValueError for an unknown key."""
    if not isinstance(table, dict):
        raise ValueError("model_store must be a table")
    staging = table.get("staging", {})
    if not isinstance(staging, dict):
        raise ValueError("model_store.staging must be a table")
    given = {**table, **{f"staging.{key}": value for key, value in staging.items()}}
    given.pop("staging", None)
    keys: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _KEYS:
            raise ValueError(f"no setting {quoted(f'model_store.{key}')}; the table has: {', '.join(_KEYS)}")
        name = _KEYS[key]
        keys[name] = not value if name.startswith("no_") and isinstance(value, bool) else value
    return keys
