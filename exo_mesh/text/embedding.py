"""Reads how a model makes vectors of texts: the files of sentence-transformers beside its config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from exo_mesh.domain.embedding import LOGIT_SCORE, Pooling, is_classifier, is_encoder
from exo_mesh.errors import InputError, ModelError
from exo_mesh.weights.model_files import (
    LENGTH_FILE,
    MODULES_FILE,
    POOLING_FILE,
    PROMPTS_FILE,
    SCORE_FILE,
    exists,
    named,
    place_of,
    read_json_if_there,
    read_steps,
    shown,
)

MAX_PROMPTS = 256

_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
"""Switches of the pooling's config; sentence-transformers joins the vectors of several, which is not supported."""

_NAMES: dict[str, Pooling] = {"cls": "first", "mean": "mean", "max": "max", "lasttoken": "last"}
"""The same as one word, as newer files have it."""

_STEPS = ("Transformer", "Pooling", "Normalize")
"""The steps that are supported, by the last part of their class names."""


class EmbeddingSettings(msgspec.Struct, frozen=True):
    """How a model makes vectors. whole: its layers see a text at once, so the text is computed in one piece.

    max_tokens: of a text; None: the model's context limit. prompts: texts that are put before an input, by name.
    default_prompt: the name of the prompt for inputs without one; "" for none. num_scores: outputs of the classifier;
    0 for a model that makes vectors. choice: see EmbedSpec; its prompt is made with the chat template, of messages with
    the roles query and document.
    """

    pooling: Pooling = "mean"
    whole: bool = False
    max_tokens: int | None = None
    prompts: Mapping[str, str] = msgspec.field(default_factory=dict)
    default_prompt: str = ""
    num_scores: int = 0
    choice: tuple[int, ...] = ()

    def prompt(self, name: str | None, param: str) -> str:
        """The text of a prompt; of the default one without a name. Raises InputError for an unknown name."""
        wanted = self.default_prompt if name is None else name
        if not wanted:
            return ""
        if wanted not in self.prompts:
            known = ", ".join(sorted(self.prompts)[:20]) or "none"
            raise InputError(f'{param}: this model has no prompt named "{wanted[:40]}"; it has: {known}', param=param)
        return self.prompts[wanted]

    def prompt_for(self, use: str) -> str:
        """The text of the prompt for a use, such as search_query; of the default prompt if there is none for it."""
        names = (*_USES.get(use, (use,)), self.default_prompt)
        return next((self.prompts[name] for name in names if name in self.prompts), "")


_USES = {
    **dict.fromkeys(("query", "search_query"), ("query",)),
    **dict.fromkeys(("document", "passage", "search_document", "corpus"), ("document", "passage", "corpus")),
}
"""The names of prompts for a use of a text, as Cohere, NVIDIA and Voyage call the uses, and sentence-transformers the
prompts."""


def read_embedding_settings(directory: Path) -> EmbeddingSettings:
    """Read the settings of a model. It blocks. Raises ModelError, naming file and key, for a step from text to vector
    that is not supported."""
    config = read_json_if_there(directory / "config.json")
    whole = is_encoder(config)
    classifies = is_classifier(config)
    prompts, default = _prompts(directory / PROMPTS_FILE)
    steps = read_steps(directory)
    if steps and LOGIT_SCORE in steps and not classifies:
        choice = _choice(directory)
        return EmbeddingSettings("score", False, _max_tokens(directory, config, whole), prompts, default, 1, choice)
    pooling: Pooling = "score" if classifies else _pooling(directory, steps)
    most = _max_tokens(directory, config, whole)
    return EmbeddingSettings(pooling, whole, most, prompts, default, _num_scores(config) if classifies else 0)


def _choice(directory: Path) -> tuple[int, ...]:
    """The tokens whose logits make a score."""
    file = place_of(directory, SCORE_FILE)
    config = read_json_if_there(file)
    choice = config.get("true_token_id"), config.get("false_token_id")
    if not _is_token(choice[0]) or not (choice[1] is None or _is_token(choice[1])):
        raise ModelError(f"{named(file)}: true_token_id and false_token_id are {shown(choice)}, not token ids")
    return tuple(one for one in choice if one is not None)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _pooling(directory: Path, steps: Sequence[str] | None) -> Pooling:
    """The pooling of modules.json; without that file the mean, as sentence-transformers chooses it."""
    modules = directory / MODULES_FILE
    if steps is None:
        return "mean"
    for kind in steps:
        if kind not in _STEPS:
            raise ModelError(f"{named(modules)}: the step {shown(kind)} is not supported; known: {', '.join(_STEPS)}")
    file = place_of(directory, POOLING_FILE)
    if not exists(file):
        raise ModelError(f"{named(modules)} names 1_Pooling, but its config.json is missing")
    return _mode(file, read_json_if_there(file))


def _mode(file: Path, config: Mapping[str, Any]) -> Pooling:
    if config.get("include_prompt") is False:
        raise ModelError(f"{named(file)}: include_prompt false is not supported")
    name = config.get("pooling_mode")
    if isinstance(name, str):
        if name not in _NAMES:
            raise ModelError(f"{named(file)}: pooling_mode {shown(name)} is not supported; known: {', '.join(_NAMES)}")
        return _NAMES[name]
    on = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if len(on) != 1 or on[0] not in _MODES:
        wanted = ", ".join(on) or "no mode"
        raise ModelError(
            f"{named(file)} turns on {wanted[:200]}; exactly one of these is supported: {', '.join(_MODES)}"
        )
    return _MODES[on[0]]


def _max_tokens(directory: Path, config: Mapping[str, Any], whole: bool) -> int | None:
    """The most tokens of a text: of sentence_bert_config.json, and for an encoder also its positions."""
    found: list[int] = []
    if _is_count(most := read_json_if_there(directory / LENGTH_FILE).get("max_seq_length")):
        found.append(most)
    most = config.get("max_position_embeddings", config.get("n_positions"))
    if whole and _is_count(most):
        padding = config.get("pad_token_id", 1)
        is_offset = config.get("model_type") in _OFFSET_POSITIONS and isinstance(padding, int)
        found.append(max(1, most - padding - 1) if is_offset else most)
    return min(found, default=None)


_OFFSET_POSITIONS = ("camembert", "roberta", "xlm-roberta")
"""Families whose first position comes after the number of the padding token."""


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _prompts(file: Path) -> tuple[dict[str, str], str]:
    """(prompts by name, the name of the default prompt)"""
    config = read_json_if_there(file)
    prompts = config.get("prompts")
    pairs = list(prompts.items())[:MAX_PROMPTS] if isinstance(prompts, dict) else []
    found = {name: text for name, text in pairs if isinstance(text, str)}
    default = config.get("default_prompt_name")
    return found, default if isinstance(default, str) and default in found else ""


def _num_scores(config: Mapping[str, Any]) -> int:
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) and labels else config.get("num_labels", 2)
    return count if _is_count(count) else 2
