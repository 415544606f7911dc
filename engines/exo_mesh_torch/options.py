"""The options of this engine as far as they can be checked without torch: `--engine-option batching=off`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from exo_mesh.errors import InputError

SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}
DTYPE_NAMES = ("float32", "bfloat16", "float16")
MAX_THREADS = 1024
OPTIONS = ("device", "dtype", "threads", "batching", "packed", "quantised", "tables")
TABLES = ("auto", "disk", "memory")
_SWITCHES = ("batching", "packed", "quantised")


def check_options(options: Mapping[str, str]) -> None:
    """Raises InputError that names an unknown option, or a value that no machine can use."""
    for name, value in options.items():
        if name not in OPTIONS:
            raise InputError(
                f"the torch engine has no option {json.dumps(name)}; it has {', '.join(OPTIONS)}", param=name
            )
        if name in _SWITCHES and value not in ("on", "off"):
            raise _unknown(name, value, ("on", "off"))
        if name == "tables" and value not in TABLES:
            raise _unknown(name, value, TABLES)
        if name == "dtype" and SHORT_DTYPES.get(value, value) not in ("auto", *DTYPE_NAMES):
            raise _unknown(name, value, DTYPE_NAMES)
        is_count = value.isdecimal() and 1 <= int(value[:9]) <= MAX_THREADS
        if name == "threads" and value != "auto" and not is_count:
            raise InputError(f"option threads={json.dumps(value)} is not a number from 1 to {MAX_THREADS}", param=name)


def _unknown(name: str, value: str, known: tuple[str, ...]) -> InputError:
    return InputError(f"option {name}={json.dumps(value)} is unknown; supported: {', '.join(known)}", param=name)
