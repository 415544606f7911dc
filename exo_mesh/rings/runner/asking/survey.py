"""`python -m exo_mesh.rings.runner.asking.survey ENGINE MODEL_DIR [OPTIONS]`: prints an engine's survey as JSON.

OPTIONS: a JSON object of the engine options with which the stages would be loaded.

A node starts it in a process of its own: the engine imports its library and builds the model without weights, and a
node imports no tensor library.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import msgspec

from exo_mesh.engine.contract import EngineProvider, ModelSurvey, Surveyor
from exo_mesh.engine.registry import provider
from exo_mesh.errors import EngineError, MeshError, ModelError
from exo_mesh.rings.runner.asking.lifeline import tie
from exo_mesh.weights.model_files import without_paths

MAX_TEXT = 300
"""Most characters of a foreign error's text."""


def survey(found: EngineProvider, model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
    """Ask the engine for its survey. Raises ModelError for a model that the engine cannot run, EngineError for an
    engine that has no survey."""
    if not isinstance(found, Surveyor):
        raise EngineError(f"engine {found.name} has no survey; it can cut every model at any layer")
    return found.survey(model_dir, options)


def main(argv: list[str]) -> int:
    """Print the answer; see `answer`."""
    engine, model_dir, *rest = argv
    try:
        said, code = answer(provider(engine), Path(model_dir), json.loads(rest[0]) if rest else {})
    except MeshError as exc:
        said, code = {"error": str(exc)}, 1
    sys.stdout.write("\n" + json.dumps(said) + "\n")
    return code


def answer(found: EngineProvider, model_dir: Path, options: Mapping[str, str]) -> tuple[dict[str, object], int]:
    """{"survey": …}; {"unable": why} if the engine cannot run the model; {"error": …} and 1 for the rest."""
    try:
        return {"survey": msgspec.to_builtins(survey(found, model_dir, options))}, 0
    except ModelError as exc:
        return {"unable": without_paths(str(exc), model_dir)}, 0
    except MeshError as exc:
        return {"error": without_paths(str(exc), model_dir)}, 1
    except Exception as exc:  # noqa: BLE001 - any error of an engine's library, for a model that it was not written for
        traceback.print_exc()
        text = " ".join(str(exc).split())[:MAX_TEXT]
        why = f"engine {found.name} cannot run the model: its code failed with {type(exc).__name__}: {text}"
        return {"unable": without_paths(why, model_dir)}, 0


if __name__ == "__main__":
    sys.exit(main(tie(sys.argv[1:])))
