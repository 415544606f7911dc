"""Makes one vector of the hidden states of a prompt, which come round in chunks."""

from __future__ import annotations

import numpy as np

from exo_mesh.domain.embedding import MAX_WIDTH, EmbedSpec
from exo_mesh.errors import EngineError


class PooledVector:
    """The vector of one prompt so far. Sums are in float64, so that they do not depend on the chunks in float32."""

    def __init__(self, spec: EmbedSpec) -> None:
        self._spec = spec
        self._value: np.ndarray | None = None
        self._count = 0

    def add(self, hidden: np.ndarray) -> None:
        """Add the states of the next tokens, float32 `[tokens, width]`. Raises EngineError if they are not numbers, or
        too wide."""
        if hidden.shape[1] > MAX_WIDTH:
            raise EngineError(f"the hidden states have {hidden.shape[1]} values, more than {MAX_WIDTH}")
        if not np.isfinite(hidden).all():
            raise EngineError("the model gave hidden states that are not finite numbers")
        before, self._count = self._value, self._count + len(hidden)
        match self._spec.pooling:
            case "mean":
                total = hidden.sum(axis=0, dtype=np.float64)
                self._value = total if before is None else before + total
            case "max":
                most = hidden.max(axis=0)
                self._value = most if before is None else np.maximum(before, most)
            case "first":
                self._value = hidden[0].copy() if before is None else before
            case "last" | "score":
                self._value = hidden[-1].copy()

    def result(self) -> bytes:
        """The vector, as float32 values, little-endian. Raises EngineError for a length of 0 that cannot become 1."""
        assert self._value is not None, "all states have come"
        value = self._value.astype(np.float64)
        if self._spec.pooling == "mean":
            value /= self._count
        if self._spec.dimensions:
            value = value[: self._spec.dimensions]
        if self._spec.normalise:
            length = float(np.linalg.norm(value))
            if not length:
                raise EngineError("the vector is zero, so its length cannot be made 1")
            value /= length
        return value.astype("<f4").tobytes()
