"""The options of the torch engine, as far as they can be checked without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping

from exo_mesh.errors import InputError

OPTIONS = ("device", "dtype", "threads", "batching", "packed", "quantised")
DTYPE_NAMES = ("float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}
_SWITCHES = ("batching", "packed", "quantised")


def check_options(options: Mapping[str, str]) -> None:
    """Raises InputError naming an unknown option or value; whether this machine has a device, only torch knows."""
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise InputError(
            f"the torch engine has no option {json.dumps(unknown[0])}; it has {', '.join(OPTIONS)}", param=unknown[0]
        )
    for name in _SWITCHES:
        if (value := options.get(name, "on")) not in ("on", "off"):
            raise InputError(f"option {name}={json.dumps(value)} is unknown; supported: on, off", param=name)
    dtype = options.get("dtype", "auto")
    if SHORT_DTYPES.get(dtype, dtype) not in ("auto", *DTYPE_NAMES):
        raise InputError(
            f"option dtype={json.dumps(dtype)} is unknown; supported: {', '.join(DTYPE_NAMES)}", param="dtype"
        )
    threads = options.get("threads", "auto")
    if threads != "auto" and not (threads.isdecimal() and len(threads) < 5 and 1 <= int(threads) <= 1024):
        raise InputError(f"option threads={json.dumps(threads)} is not a number from 1 to 1024", param="threads")
