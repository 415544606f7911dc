"""`python -m exo_mesh.runner.cuts ENGINE MODEL_DIR`: where an engine can cut a model, as one line of JSON.

Started by a node, in a process of its own: an engine finds this out by importing its library and building the model
without weights, and a node imports no tensor library.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from exo_mesh.engine.contract import CutTracer
from exo_mesh.engine.registry import provider
from exo_mesh.errors import MeshError, ModelError


def main(argv: list[str]) -> int:
    """{"cuts": [...]}; of a model that runs in one piece only, [] and the reason. {"error": ...} and 1 for the rest."""
    engine, model_dir = argv
    answer: dict[str, object] = {}
    code = 0
    try:
        found = provider(engine)
        if not isinstance(found, CutTracer):
            raise MeshError(f"engine {engine} can cut every model anywhere; there is nothing to find out")
        answer["cuts"] = list(found.legal_cuts(Path(model_dir)))
    except ModelError as exc:
        answer = {"cuts": [], "reason": str(exc)}
    except MeshError as exc:
        answer, code = {"error": str(exc)}, 1
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
