"""`python -m exo_mesh.weights.card_child DIR NAME`: reads the card of a large checkpoint in a process of its own.

Headers of hundreds of thousands of tensors take some hundred MB while they are read. In a child process this memory is
limited and freed, the event loop of the node is not blocked, and a read that hangs can be ended.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import msgspec

from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import ModelError
from exo_mesh.weights.card import read_card
from exo_mesh.weights.model_files import label, open_model_file, size_of
from exo_mesh.weights.safetensors import INDEX_FILE, SINGLE_FILE

LARGE_BYTES = 2 * 2**20
"""Size of a header or index from which a child process is worth it: a node that reads 2 MB of headers grows by about 12
MB for 0.1 s."""

LIMIT_S = 15.0
"""Most seconds of computing and of waiting: 300,000 tensors take about 2 s."""

MEMORY_BYTES = 2 * 10**9


class CardAnswer(msgspec.Struct):
    card: ModelCard | None = None
    unusable: str = ""


def read_card_within_limits(model_dir: Path, name: str) -> ModelCard:
    """As read_card; in a child process if the checkpoint has many tensors. Blocks."""
    return _ask(model_dir, name) if _is_large(model_dir) else read_card(model_dir, name)


def _is_large(model_dir: Path) -> bool:
    """Whether the headers are large. A checkpoint that cannot be read is not large: read_card then reports the
    error."""
    try:
        with open_model_file(model_dir / SINGLE_FILE) as stream:
            prefix = stream.read(8)
            return len(prefix) == 8 and int(struct.unpack("<Q", prefix)[0]) > LARGE_BYTES
    except FileNotFoundError:
        pass  # the weights are in several files
    except (OSError, ModelError):
        return False
    try:
        return size_of(model_dir / INDEX_FILE) > LARGE_BYTES
    except (OSError, ModelError):
        return False


def _ask(model_dir: Path, name: str) -> ModelCard:
    """Read the card in a child process. Raises ModelError for an unusable model, and if the child does not answer."""
    command = [sys.executable, "-m", "exo_mesh.weights.card_child", str(model_dir), name]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False, start_new_session=True
        )
        answer = msgspec.json.decode(child.stdout, type=CardAnswer)
    except subprocess.TimeoutExpired as exc:
        raise ModelError(f"{label(model_dir)}: reading its headers takes more than {LIMIT_S:.0f} s") from exc
    except (OSError, msgspec.DecodeError) as exc:
        raise ModelError(f"{label(model_dir)}: reading its headers failed") from exc
    if answer.card is None:
        raise ModelError(answer.unusable)
    return answer.card


def main(argv: list[str]) -> int:
    """Print {"card": …} or {"unusable": why}."""
    from exo_mesh.base.process_limits import limit_work

    model_dir, name = argv
    limit_work(LIMIT_S, MEMORY_BYTES)
    try:
        answer: dict[str, object] = {"card": msgspec.to_builtins(read_card(Path(model_dir), name))}
    except ModelError as exc:
        answer = {"unusable": str(exc)}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
