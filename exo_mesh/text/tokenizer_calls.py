"""Runs the methods of text models for a node, inside a child process (`template_child`)."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from exo_mesh.base.long_texts import slices
from exo_mesh.errors import ContextLengthError, InputError, MeshError, ModelError
from exo_mesh.text.control_text import ChatPrompt
from exo_mesh.text.detokenizer import is_panic
from exo_mesh.text.template import MAX_LENGTH, TemplateTraits
from exo_mesh.text.template_wire import (
    Answer,
    OpenTokenizer,
    ReadTokenizer,
    TableAnswered,
    TemplateUnknown,
    TokenizerOpened,
    TokenizerPart,
    TokenizerQuestion,
    TokenizerRefused,
    UseTokenizer,
)
from exo_mesh.text.token_table import TokenTable, head_of, parts_of

if TYPE_CHECKING:
    from exo_mesh.text.tokenizer import TextModel

MAX_KEPT, MAX_KEPT_BYTES = 8, 32 << 20
"""Most text models in memory, and most bytes of their tokenizer.json files together; the last one is kept in any case.
A tokenizer takes some ten times as much memory as its file."""

PART_IDS = 1 << 16
"""Ids that are sent at a time."""

MAX_MESSAGE = 500
"""Most characters of an error."""


class Tokenizers:
    """Keeps the text models of a process and calls their methods."""

    def __init__(self) -> None:
        self._bases: OrderedDict[str, tuple[TextModel, int]] = OrderedDict()  # and the size of its tokenizer.json
        self._kept: dict[str, tuple[str, TextModel]] = {}  # by key: a base, and that model with a template

    def answers(self, question: TokenizerQuestion, text: str) -> Iterator[Answer]:
        """The answer in parts. Every error of a tokenizer becomes a refusal. text: the argument of the method."""
        try:
            if isinstance(question, OpenTokenizer):
                self._open(question)
                yield TokenizerOpened()
            elif isinstance(question, ReadTokenizer):
                yield from self._table(question)
            elif (found := self._kept.get(question.key)) is None:
                yield TemplateUnknown()
            else:
                self._bases.move_to_end(found[0])
                yield from _parts(_called(found[1], question, text))
        except MemoryError:
            yield TokenizerRefused(ModelError.code, "needs too much memory", is_spent=True)
        except MeshError as exc:
            yield TokenizerRefused(exc.code, _short(str(exc)), getattr(exc, "param", None))
        except BaseException as exc:  # a boundary: a hostile tokenizer may trigger any bug of the library
            if not isinstance(exc, Exception) and not is_panic(exc):
                raise
            yield TokenizerRefused(ModelError.code, f"the tokenizer cannot be used: {_short(str(exc))}")

    def _open(self, question: OpenTokenizer) -> None:
        made = self._base(question.base, question.directory)
        if question.written is not None and made.template is not None:
            traits = TemplateTraits(written=question.written)
            made = made.with_template(replace(made.template, traits=traits, tool_use=None))
        self._kept[question.key] = question.base, made

    def _table(self, question: ReadTokenizer) -> Iterator[TableAnswered]:
        """The table of a model in parts."""
        began = time.process_time()
        model = self._base(question.base, question.directory)
        assert not isinstance(model.tokenizer, TokenTable)
        yield TableAnswered(head_of(model.tokenizer), model.bounds)
        for part in parts_of(model.tokenizer):
            yield TableAnswered(part=part)
        yield TableAnswered(cpu_s=time.process_time() - began, is_last=True)

    def _base(self, base: str, directory: str) -> TextModel:
        from exo_mesh.text.tokenizer import TextModel  # late: the processes that render templates do not need it

        if base not in self._bases:
            size = (Path(directory) / "tokenizer.json").stat().st_size
            self._bases[base] = TextModel.open(Path(directory)), size
        self._bases.move_to_end(base)
        while len(self._bases) > 1 and (
            len(self._bases) > MAX_KEPT or sum(size for _, size in self._bases.values()) > MAX_KEPT_BYTES
        ):
            gone, _ = self._bases.popitem(last=False)
            self._kept = {key: found for key, found in self._kept.items() if found[0] != gone}
        return self._bases[base][0]


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
