"""`python -m exo_mesh.rings.runner.asking.layer_speed ENGINE MODEL_DIR OPTIONS`: prints an engine's speed as JSON.

OPTIONS: a JSON object of the engine options with which the stages would be loaded.

A node starts it in a process of its own, because the engine imports its library and loads a few layers.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from msgspec import to_builtins

from exo_mesh.engine.layer_speed import MAX_OTHER_WORK, OtherWork, measure_speed
from exo_mesh.engine.registry import provider
from exo_mesh.errors import MeshError
from exo_mesh.rings.runner.asking.lifeline import tie
from exo_mesh.weights.model_files import without_paths

MAX_TEXT = 300
"""Most characters of a foreign error's text."""


def main(argv: list[str]) -> int:
    """Print {"speed": …}; {"disturbed": share} if other processes used that share of the cores meanwhile, so that the
    figures would be wrong; or {"error": …} and return 1."""
    engine, directory, options = argv
    model_dir = Path(directory)
    try:
        others = OtherWork()
        speed = measure_speed(provider(engine), model_dir, json.loads(options))
        share = others.share()
        said: dict[str, object] = {"disturbed": share} if share > MAX_OTHER_WORK else {"speed": to_builtins(speed)}
    except MeshError as exc:
        said = {"error": without_paths(str(exc), model_dir)}
    except Exception as exc:  # noqa: BLE001 - any error of an engine's library, for a model that it was not written for
        traceback.print_exc()
        text = " ".join(str(exc).split())[:MAX_TEXT]
        said = {"error": without_paths(f"{type(exc).__name__}: {text}", model_dir)}
    sys.stdout.write("\n" + json.dumps(said) + "\n")
    return int("error" in said)


if __name__ == "__main__":
    sys.exit(main(tie(sys.argv[1:])))
