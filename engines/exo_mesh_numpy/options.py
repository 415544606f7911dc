"""The settings of this engine: `--engine-option mode=deterministic`."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from exo_mesh.errors import InputError
from exo_mesh_numpy.threads import check_threads

MODES = ("fast", "deterministic")
DTYPES = ("float32",)

_KNOWN = {"mode": MODES, "dtype": DTYPES}
_NAMES = (*_KNOWN, "threads")


class NumpyOptions(msgspec.Struct, frozen=True):
    """The parsed options. mode: "fast" is plain BLAS; "deterministic" gives a row the same bits whatever other rows are
    computed. dtype: of the weights. threads: of BLAS, a number or "auto"; see set_threads."""

    mode: str = "fast"
    dtype: str = "float32"
    threads: str = "auto"


def parse_options(options: Mapping[str, str]) -> NumpyOptions:
    """Parse the engine options. Raises InputError for an unknown option or value."""
    for name, value in options.items():
        if name not in _NAMES:
            raise InputError(
                f"the numpy engine has no option {json.dumps(name)}; it has {', '.join(_NAMES)}", param=name
            )
        if name in _KNOWN and value not in _KNOWN[name]:
            raise InputError(f"{name}={value} is not known; it may be {' or '.join(_KNOWN[name])}", param=name)
    check_threads(options.get("threads", "auto"))
    return NumpyOptions(**options)
