"""How the hidden states of a text become one vector, and which models make vectors, by their config.json. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Pooling = Literal["mean", "last", "first", "max", "score"]
"""mean, max: over all tokens of the text. last, first: the state of that token. score: one number for the text, from
the classifier that the model has in place of a language model's head, or from the logits of a language model."""

MAX_WIDTH = 2**16
"""Most values of a vector. The widest models have some ten thousand."""


class EmbedSpec(msgspec.Struct, frozen=True):
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


GENERATION, EMBEDDINGS, RERANK = "text_generation", "embeddings", "rerank"
"""Tasks by their names on cards."""

DECODER_TASKS = (GENERATION, EMBEDDINGS)
"""The tasks of a language model: its hidden states are vectors, too."""

ENCODERS = frozenset({"bert", "camembert", "distilbert", "modernbert", "nomic_bert", "roberta", "xlm-roberta"})
"""Values of `model_type` whose layers see a whole text at once."""

CLASSIFIER = "ForSequenceClassification"

LOGIT_SCORE = "LogitScore"
"""The step of sentence-transformers that makes a score of a language model's logits."""

_NAMES = {GENERATION: "generate text", EMBEDDINGS: "make embeddings", RERANK: "rerank documents"}


def is_encoder(config: Mapping[str, Any]) -> bool:
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in ENCODERS


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether the model's head scores a text, in place of a language model's head."""
    return _class_of(config).endswith(CLASSIFIER)


def find_tasks(config: Mapping[str, Any], steps: Sequence[str] | None) -> tuple[str, ...]:
    """The tasks of a model. steps: of its modules.json of sentence-transformers, with which a model is for vectors or
    scores alone; None without such a file."""
    if is_classifier(config) or (steps and LOGIT_SCORE in steps):
        return (RERANK,)
    if is_encoder(config) or steps is not None or _class_of(config).endswith("Model"):
        return (EMBEDDINGS,)
    return DECODER_TASKS


def why_not(model: str, tasks: tuple[str, ...], wanted: str) -> str:
    """Says in a sentence why a model cannot do a task, and names its tasks; "" if it can do the task."""
    if wanted in tasks:
        return ""
    able = " and ".join(_NAMES.get(task, task.replace("_", " ")) for task in tasks) or "do nothing that this API has"
    return f"{model} cannot {_NAMES[wanted]}; it can {able}"


def _class_of(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    return first if isinstance(first, str) else ""
