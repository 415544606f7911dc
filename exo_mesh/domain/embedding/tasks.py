"""Finds what a model is for, from its config.json. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
