"""What the dummy engine says, whatever the ring: each token is a hash of the one before and of its position."""

from __future__ import annotations

from pathlib import Path

from exo_mesh_dummy.model import read_dummy_model
from exo_mesh_dummy.payload import mix


def dummy_text(model_dir: Path, prompt: str, num_tokens: int) -> str:
    """The answer to a prompt, for a checkpoint of tests.support.checkpoints, whose tokens are bytes."""
    printable = read_dummy_model(model_dir).printable.tolist()
    tokens = list(prompt.encode())
    for position in range(len(tokens) - 1, len(tokens) - 1 + num_tokens):
        tokens.append(printable[mix(tokens[-1], position) % len(printable)])
    return bytes(tokens[len(prompt.encode()) :]).decode()
