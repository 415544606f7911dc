"""How the hidden states of a text become one vector. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pooling = Literal["mean", "last", "first", "max", "score"]
"""mean, max: over all tokens of the text. last, first: the state of that token. score: one number for the text, from
the classifier that the model has in place of a language model's head, or from the logits of a language model."""

MAX_WIDTH = 2**16
"""Most values of a vector. The widest models have some ten thousand."""


@dataclass(frozen=True, slots=True)
class EmbedSpec:
    """The vector that a request wants of its prompt, in place of output tokens.

    normalise: scale the vector to length 1. dimensions: keep only that many first values, before the scaling; 0 keeps
    all. whole: each token sees all others, as in an encoder, so the text must be computed in one row. second: where
    the second text of a pair begins; 0 for a single text. choice: for a score from logits, the token ids `(yes,)`
    or `(yes, no)`: the score is the logit of yes after the text, minus the logit of no if it is given.
    """

    pooling: Pooling = "mean"
    normalise: bool = True
    dimensions: int = 0
    whole: bool = False
    second: int = 0
    choice: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.choice) > 2 or (self.choice and self.pooling != "score"):
            raise ValueError(f"bad choice: {len(self.choice)} tokens for pooling {self.pooling}")
        if not 0 <= self.dimensions <= MAX_WIDTH or self.second < 0:
            raise ValueError(f"bad embedding: dimensions={self.dimensions} second={self.second}")
