"""The state of a sequence as bytes that another stage object of the same layers can restore."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import SavedSequence
from exo_mesh.errors import EngineError

_STATE, _FORM = "state", "form"
"""Tensors of a saved sequence: the library's bytes as int32 (padded with zeros), and what they belong to as JSON."""


def packed(state: np.ndarray, length: int, stage: Mapping[str, str]) -> SavedSequence:
    """state: uint8 `[n]`. stage: what the restoring stage must have in common."""
    words = np.zeros(-(-len(state) // 4), np.int32)
    words.view(np.uint8)[: len(state)] = state
    form = json.dumps({**stage, "length": length, "bytes": len(state)}, sort_keys=True).encode()
    tensors = {_STATE: Tensor.from_numpy(words), _FORM: Tensor.from_numpy(np.frombuffer(form, np.uint8))}
    return SavedSequence(length, tensors)


def unpacked(saved: SavedSequence, stage: Mapping[str, str]) -> np.ndarray:
    """The state, uint8 `[n]`. Raises EngineError if it does not belong to such a stage or is not whole."""
    if set(saved.tensors) != {_STATE, _FORM}:
        raise EngineError(f"a saved sequence has the tensors {_STATE} and {_FORM}, not {sorted(saved.tensors)}")
    words, form = saved.tensors[_STATE], saved.tensors[_FORM]
    if words.dtype != "int32" or len(words.shape) != 1 or form.dtype != "uint8" or len(form.shape) != 1:
        raise EngineError(f"saved {_STATE} is {words.dtype}{list(words.shape)}, which does not fit this stage")
    try:
        found = json.loads(bytes(form.data))
    except ValueError as exc:
        raise EngineError(f"saved {_FORM} is not JSON") from exc
    num_bytes = found.get("bytes") if isinstance(found, dict) else None
    if not isinstance(num_bytes, int) or not words.num_bytes - 4 < num_bytes <= words.num_bytes:
        raise EngineError(f"saved {_STATE} has {words.num_bytes} bytes, its form says {num_bytes}")
    if found != {**stage, "length": saved.length, "bytes": num_bytes}:
        raise EngineError(f"the saved sequence is of another stage, or of other length: {json.dumps(found)[:300]}")
    return np.array(words.numpy()).view(np.uint8)[:num_bytes]
