"""The settings of this engine: `--engine-option batch_attention=off`."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from exo_mesh.errors import InputError

_KNOWN = {"batch_attention": ("on", "off")}


class MlxOptions(msgspec.Struct, frozen=True):
    """The parsed options. batch_attention: rows of similar length attend in one call; otherwise each row attends by
    itself, and on a CPU has the bits that it has alone."""

    batch_attention: bool = True


def parse_options(options: Mapping[str, str]) -> MlxOptions:
    """Parse the engine options. Raises InputError for an unknown option or value."""
    for name, value in options.items():
        if name not in _KNOWN:
            raise InputError(f"the mlx engine has no option {json.dumps(name)}; it has {', '.join(_KNOWN)}", param=name)
        if value not in _KNOWN[name]:
            raise InputError(f"{name}={value} is not known; it may be {' or '.join(_KNOWN[name])}", param=name)
    return MlxOptions(batch_attention=options.get("batch_attention", "on") == "on")
