"""Asks a library for its devices in a process of its own.

`python -m exo_mesh_llamacpp.gpu.probe '{"library": "PATH"}'` prints them. A node does not open a library of tensors,
and a driver may hang or end the process that asks it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache

from msgspec import to_builtins

from exo_mesh.errors import EngineError, MeshError
from exo_mesh_llamacpp.devices import BackendDevice

TIMEOUT_S = 30.0
"""Drivers of GPUs that sleep take seconds to answer."""


def devices_of(options: Mapping[str, str]) -> tuple[BackendDevice, ...]:
    """The devices of the library that option `library` names, asked once per process. Blocking. Raises EngineError."""
    return _ask(options.get("library", ""))


@cache
def _ask(library: str) -> tuple[BackendDevice, ...]:
    command = [sys.executable, "-m", "exo_mesh_llamacpp.gpu.probe", json.dumps({"library": library} if library else {})]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise EngineError(f"the library does not say which devices it has: {exc}") from exc
    try:
        answer = json.loads(asked.stdout.splitlines()[-1])
        if "error" in answer:
            raise EngineError(str(answer["error"]))
        return tuple(BackendDevice(**device) for device in answer["devices"])
    except (IndexError, ValueError, TypeError, KeyError) as exc:
        lines = asked.stderr.strip().splitlines() or ["it printed nothing"]
        raise EngineError(f"asking the library for its devices failed with {asked.returncode}: {lines[-1]}") from exc


def main(text: str) -> None:
    """Prints the devices as one line of JSON, or the error."""
    from exo_mesh_llamacpp.library import open_library
    from exo_mesh_llamacpp.library_file import chosen_library

    answer: dict[str, object]
    try:
        answer = {
            "devices": [to_builtins(device) for device in open_library(chosen_library(json.loads(text))).devices()]
        }
    except MeshError as exc:
        answer = {"error": str(exc)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
