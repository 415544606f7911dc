"""`python -m exo_mesh.runner.survey ENGINE MODEL_DIR [OPTIONS]`: what an engine knows of a model, a line of JSON.

OPTIONS: a JSON object of engine options, with which the stages would be loaded.

Started by a node, in a process of its own: an engine finds this out by importing its library and building the model
without weights, and a node imports no tensor library.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from exo_mesh.engine.contract import EngineProvider, ModelSurvey, Surveyor
from exo_mesh.engine.registry import provider
from exo_mesh.errors import EngineError, MeshError, ModelError
from exo_mesh.model_files import without_paths
from exo_mesh.runner.lifeline import tie

MAX_TEXT = 300
"""Characters of a foreign error's text."""


def survey(found: EngineProvider, model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
    """Raises ModelError for a model that the engine cannot run, EngineError for an engine that has nothing to say."""
    if not isinstance(found, Surveyor):
        raise EngineError(f"engine {found.name} can cut every model anywhere; there is nothing to find out")
    return found.survey(model_dir, options)


def main(argv: list[str]) -> int:
    """Prints the answer; see `answer`."""
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
        return {"survey": asdict(survey(found, model_dir, options))}, 0
    except ModelError as exc:
        return {"unable": without_paths(str(exc), model_dir)}, 0
    except MeshError as exc:
        return {"error": without_paths(str(exc), model_dir)}, 1
    except Exception as exc:  # noqa: BLE001 - an engine's library, on a model that it was not written for
        traceback.print_exc()
        text = " ".join(str(exc).split())[:MAX_TEXT]
        why = f"engine {found.name} cannot run the model: its code failed with {type(exc).__name__}: {text}"
        return {"unable": without_paths(why, model_dir)}, 0


if __name__ == "__main__":
    sys.exit(main(tie(sys.argv[1:])))
