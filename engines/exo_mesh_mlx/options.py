"""The settings of this engine: there are none."""

from __future__ import annotations

import json
from collections.abc import Mapping

from exo_mesh.errors import InputError


def check_options(options: Mapping[str, str]) -> None:
    """Raises InputError for any option: this engine has no settings of its own."""
    for name in options:
        raise InputError(f"the mlx engine has no option {json.dumps(name)}", param=name)
