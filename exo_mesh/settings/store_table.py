"""The table [model_store] of config.toml: another way to write the settings of the model store."""

from __future__ import annotations

from typing import Any

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
"""The key of config.toml for each key of the table. A `no_…` key is the opposite of the table's."""


def store_keys(table: Any) -> dict[str, Any]:
    """The keys of config.toml that the table stands for. Raises ValueError for a key that it does not have."""
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
            raise ValueError(f"no setting 'model_store.{key}'; there are: {', '.join(_KEYS)}")
        name = _KEYS[key]
        keys[name] = not value if name.startswith("no_") and isinstance(value, bool) else value
    return keys
