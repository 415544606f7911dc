"""`python -m exo_mesh.runner.survey ENGINE MODEL_DIR [OPTIONS]`: what an engine knows of a model, a line of JSON.

OPTIONS: a JSON object of engine options, with which the stages would be loaded.

Started by a node, in a process of its own: an engine finds this out by importing its library and building the model
without weights, and a node imports no tensor library.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from exo_mesh.engine.contract import EngineProvider, ModelSurvey, Surveyor
from exo_mesh.engine.registry import provider
from exo_mesh.errors import EngineError, MeshError, ModelError
from exo_mesh.model_files import without_paths
from exo_mesh.runner.lifeline import tie


def survey(found: EngineProvider, model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
    """Raises ModelError for a model that the engine cannot run, EngineError for an engine that has nothing to say."""
    if not isinstance(found, Surveyor):
        raise EngineError(f"engine {found.name} can cut every model anywhere; there is nothing to find out")
    return found.survey(model_dir, options)


def main(argv: list[str]) -> int:
    """{"survey": …}; {"unable": why} if the engine cannot run the model; {"error": …} and 1 for the rest."""
    engine, model_dir, *rest = argv
    answer: dict[str, object]
    code = 0
    try:
        options = json.loads(rest[0]) if rest else {}
        answer = {"survey": asdict(survey(provider(engine), Path(model_dir), options))}
    except ModelError as exc:
        answer = {"unable": without_paths(str(exc), Path(model_dir))}
    except MeshError as exc:
        answer, code = {"error": without_paths(str(exc), Path(model_dir))}, 1
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(tie(sys.argv[1:])))
