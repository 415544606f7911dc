"""Hostile models: the demo model with an edit. Each is drawn by a random generator, and its name is its case."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from tools.fuzz.calls import judged_post
from tools.fuzz.rig import MODEL, Rig

Edit = Callable[[random.Random, Path], object]
ANSWER_S = 90.0
"""Deadline of an answer about a hostile model: a hang, on a machine of any speed."""

LISTED_S = 60.0


def demo_model(directory: Path) -> Path:
    """Copies the demo model to a directory that does not exist yet."""
    return Path(shutil.copytree(str(resources.files("exo_mesh.weights") / "shipped" / MODEL), directory))


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Reads a JSON file, lets `change` edit it, and writes it."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def case_name(seed: int, number: int, kind: str) -> str:
    return f"case-{seed}-{number}-{kind}"


def write_cases(folder: Path, seed: int, numbers: Sequence[int], edits: Mapping[str, Edit]) -> list[str]:
    """Writes one model for each case number, each with the next kind of edit; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number in numbers:
        kind = list(edits)[number % len(edits)]
        names.append(case_name(seed, number, kind))
        edits[kind](random.Random(f"{seed}/{number}"), demo_model(folder / names[-1]))
    return names


@contextmanager
def hostile_models(
    directory: Path, seed: int, numbers: Sequence[int], edits: Mapping[str, Edit]
) -> Iterator[dict[str, str]]:
    """Writes the cases where the nodes of a rig look for models; gives no variables for the nodes."""
    write_cases(directory / "models", seed, numbers, edits)
    yield {}


async def ask_all(rig: Rig, bodies: Callable[[str, random.Random], dict[str, Any]]) -> list[str]:
    """Asks the first node for each hostile model, one after the other; returns the statuses."""
    statuses = []
    for folder in sorted((rig.directory / "models").iterdir()):
        if not rig.nodes[0].alive:
            break
        rng = random.Random(folder.name)
        data = json.dumps({"model": folder.name, "max_tokens": 2, **bodies(folder.name, rng)}).encode()
        statuses.append(await judged_post(rig, "/v1/chat/completions", data, ANSWER_S, folder.name))
    return statuses
