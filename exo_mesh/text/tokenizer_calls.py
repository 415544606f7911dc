"""Runs the methods of text models for a node, inside a child process (`template_child`)."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exo_mesh.base.long_texts import slices
from exo_mesh.errors import ContextLengthError, InputError, MeshError, ModelError
from exo_mesh.text.control_text import ChatPrompt
from exo_mesh.text.detokenizer import is_panic
from exo_mesh.text.template import MAX_LENGTH, TemplateTraits
from exo_mesh.text.template_wire import (
    Answer,
    OpenTokenizer,
    TemplateUnknown,
    TokenizerOpened,
    TokenizerPart,
    TokenizerRefused,
    UseTokenizer,
)

if TYPE_CHECKING:
    from exo_mesh.text.tokenizer import TextModel

MAX_KEPT = 2
"""Most text models in memory; one with a large vocabulary takes about 50 MB."""

PART_IDS = 1 << 16
"""Ids that are sent at a time."""

MAX_MESSAGE = 500
"""Most characters of an error."""


class Tokenizers:
    """Keeps the text models of a process and calls their methods."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, TextModel] = OrderedDict()

    def answers(self, question: OpenTokenizer | UseTokenizer, text: str) -> Iterator[Answer]:
        """The answer in parts. Every error of a tokenizer becomes a refusal. text: the argument of the method."""
        try:
            if isinstance(question, OpenTokenizer):
                self._open(question)
                yield TokenizerOpened()
            elif (model := self._kept.get(question.key)) is None:
                yield TemplateUnknown()
            else:
                self._kept.move_to_end(question.key)
                yield from _parts(_called(model, question, text))
        except MemoryError:
            yield TokenizerRefused(ModelError.code, "needs too much memory", is_spent=True)
        except MeshError as exc:
            yield TokenizerRefused(exc.code, _short(str(exc)), getattr(exc, "param", None))
        except BaseException as exc:  # a boundary: a hostile tokenizer may trigger any bug of the library
            if not isinstance(exc, Exception) and not is_panic(exc):
                raise
            yield TokenizerRefused(ModelError.code, f"the tokenizer cannot be used: {_short(str(exc))}")

    def _open(self, question: OpenTokenizer) -> None:
        from exo_mesh.text.tokenizer import TextModel  # late: the processes that render templates do not need it

        made = TextModel.open(Path(question.directory))
        if question.written is not None and made.template is not None:
            traits = TemplateTraits(written=question.written)
            made = made.with_template(replace(made.template, traits=traits, tool_use=None))
        self._kept[question.key] = made
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)


def _called(model: TextModel, question: UseTokenizer, text: str) -> Any:
    args = question.args
    match question.method:
        case "encode_text":
            return model.encode_text(text)
        case "encode_prompt":
            return model.encode_prompt(text)
        case "encode_chat":
            return model.encode_chat(ChatPrompt(text, *args))
        case "encode_for_vector":
            return model.encode_for_vector(text, *args)
        case "check_length":
            return model.check_length(text, *args)
        case "marked":
            return _fitting(model.marked(text, *args), text)


def _fitting(marked: str, text: str) -> str:
    """The marked text. Raises InputError if the marks make it longer than any prompt."""
    if len(marked) > max(MAX_LENGTH, len(text)):
        message = "a text spells too many control tokens for one prompt; remove them from the message"
        raise InputError(message, param="messages")
    return marked


def _parts(result: Any) -> Iterator[TokenizerPart]:
    """A result in parts: None, a text, ids, or ids and a number."""
    if isinstance(result, str):
        for part in slices(result):
            yield TokenizerPart(text=part, is_last=False)
        yield TokenizerPart()
        return
    ids, number = result if isinstance(result, tuple) else (result or [], 0)
    starts = range(0, max(1, len(ids)), PART_IDS)
    for start in starts:
        packed = array("i", ids[start : start + PART_IDS]).tobytes()
        yield TokenizerPart(packed, number=number, is_last=start == starts[-1])


def result_of(question: UseTokenizer, parts: Sequence[TokenizerPart]) -> Any:
    """What the method returned. It blocks while it makes a list of all ids."""
    if question.method == "check_length":
        return None
    if question.method == "marked":
        return "".join(part.text for part in parts)
    ids: list[int] = []
    for part in parts:
        ids.extend(array("i", part.ids))
    return (ids, parts[-1].number) if question.method == "encode_for_vector" else ids


def error_of(refused: TokenizerRefused, name: str) -> MeshError:
    """The error that a method raised. name: the model."""
    if refused.code == ContextLengthError.code:
        return ContextLengthError(refused.message, param=refused.param)
    if refused.code == ModelError.code:
        what = f"the tokenizer of {name} " if refused.is_spent else ""
        return ModelError(f"{what}{refused.message}")
    return InputError(refused.message, param=refused.param)


def _short(text: str) -> str:
    return text[:MAX_MESSAGE].encode("utf-8", "replace").decode()
