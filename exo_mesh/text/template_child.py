"""`python -m exo_mesh.text.template_child MAX_BYTES`: a process that compiles and renders chat templates for a node.

It also checks grammars, decodes images and runs tokenizers. Templates are untrusted code, compiled code recurses over
grammars, an image may exploit its decoder, and a tokenizer may make a text much longer or take long, so all run in this
separate process, with limits that the operating system enforces:

- memory: MAX_BYTES of address space above what the process has at its start. Only Linux reports that size; elsewhere
  the node alone watches the process and ends it (see `api/core/child_processes.py`).
- CPU time: the limit of each question plus CPU_GRACE_S, after which the system ends the process. The node's own timer
  usually fires first; this limit ends a process whose node has died in the middle of a question.
- no file written, no core dump, and no new process (unless root runs the node).

Questions arrive on standard input and answers leave on standard output, one at a time. The process ends when its
standard input closes. It imports Jinja and msgspec, and no networking code of a node.
"""

from __future__ import annotations

import os
import sys
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import BinaryIO

import msgspec

from exo_mesh.base.deep_stack import in_deep_stack
from exo_mesh.base.long_texts import LongTexts, slices
from exo_mesh.base.process_limits import limit_cpu, limit_process
from exo_mesh.domain.request import GrammarSpec
from exo_mesh.errors import InputError, ModelError
from exo_mesh.text.image_wire import DecodeImage, ImageDecoded
from exo_mesh.text.rendering import CompiledTemplate
from exo_mesh.text.template_wire import (
    EXIT_OUT_OF_MEMORY,
    LENGTH,
    Answer,
    CheckGrammar,
    CompileTemplate,
    GivenText,
    GrammarSound,
    OpenTokenizer,
    Question,
    ReadTokenizer,
    RendererReady,
    RenderTemplate,
    TemplateCompiled,
    TemplateQuestion,
    TemplateRefused,
    TemplateRendered,
    TemplateTried,
    TemplateUnknown,
    TokenizerQuestion,
    TryTemplate,
    UseTokenizer,
    frame,
)
from exo_mesh.text.tokenizer_calls import Tokenizers

MAX_KEPT = 8
"""Most compiled templates in memory; a node keeps the same number of text models open."""

MAX_MESSAGE = 500
"""Most characters of an error; a template can choose its text."""


def main(argv: list[str]) -> int:
    """Answer questions until standard input closes."""
    return in_deep_stack(partial(_answer_all, int(argv[0])))  # start the thread before the limits forbid new ones


def _answer_all(max_bytes: int) -> int:
    limit_process(max_bytes)
    renderer = Renderer()
    try:
        _send(sys.stdout.buffer, RendererReady())
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # panics write there, and nobody reads it
        while (question := _receive(sys.stdin.buffer)) is not None:
            if isinstance(question, GivenText):
                renderer.given.setdefault(question.index, []).append(question.text)
                continue
            limit_cpu(question.limit_s)
            for part in renderer.answers(question):
                if not _send(sys.stdout.buffer, part):
                    break
    except MemoryError:
        return EXIT_OUT_OF_MEMORY
    return 0


class Renderer:
    """Keeps the compiled templates of this process and answers questions about templates and grammars."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, CompiledTemplate] = OrderedDict()
        self._tokenizers = Tokenizers()
        self.given: dict[int, list[str]] = {}
        """The texts of the next question, in parts."""

    def answers(self, question: TemplateQuestion | TokenizerQuestion) -> Iterator[Answer]:
        """The answer to one question, in parts."""
        texts = ["".join(self.given[index]) for index in sorted(self.given)]
        self.given.clear()
        if isinstance(question, ReadTokenizer | OpenTokenizer | UseTokenizer):
            yield from self._tokenizers.answers(question, texts[0] if texts else "")
            return
        answer = self.answer(question, texts)
        if not isinstance(answer, TemplateRendered):
            yield answer
            return
        parts = list(slices(answer.text)) or [""]
        for index, part in enumerate(parts):
            yield TemplateRendered(part, index == len(parts) - 1)

    def answer(self, question: TemplateQuestion, texts: Sequence[str] = ()) -> Answer:
        """Answer one question about a template, a grammar or an image. Every error of these becomes a refusal, and
        never an exception. texts: the texts that were sent before."""
        try:
            if isinstance(question, CompileTemplate):
                return self._compile(question)
            if isinstance(question, CheckGrammar):
                return _check_grammar(question)
            if isinstance(question, DecodeImage):
                return _decode_image(question, texts)
            compiled = self._kept.get(question.digest)
            if compiled is None:
                return TemplateUnknown()
            self._kept.move_to_end(question.digest)
            if isinstance(question, TryTemplate):
                return TemplateTried(compiled.traits(question.variables, question.limit_s))
            return _render(compiled, question, LongTexts(question.mark, texts))
        except (InputError, ModelError) as exc:
            param = getattr(exc, "param", None) or "messages"
            return TemplateRefused(_short(str(exc)), param, isinstance(exc.__cause__, MemoryError))
        except MemoryError:
            if isinstance(question, DecodeImage):
                return TemplateRefused(f"{question.where} needs too much memory", question.where, is_spent=True)
            return TemplateRefused("the model's chat template needs too much memory", is_spent=True)
        except Exception as exc:  # noqa: BLE001  a boundary: a template may trigger any bug of Jinja
            return TemplateRefused(f"the model's chat template cannot be used ({type(exc).__name__})")

    def _compile(self, question: CompileTemplate) -> TemplateCompiled:
        compiled = CompiledTemplate.compile(question.source, question.where)
        self._kept[question.digest] = compiled
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return TemplateCompiled(sorted(compiled.variables))


def _render(compiled: CompiledTemplate, question: RenderTemplate, long: LongTexts) -> TemplateRendered:
    return TemplateRendered(
        compiled.render(
            long.back_in(question.messages),
            add_generation_prompt=question.add_generation_prompt,
            continue_final_message=question.continue_final_message,
            variables=long.back_in(question.variables),
            limit_s=question.limit_s,
        )
    )


def _check_grammar(question: CheckGrammar) -> GrammarSound:
    from exo_mesh.text.grammars import check_in_this_stack

    check_in_this_stack(GrammarSpec(question.kind, question.text), question.param)
    return GrammarSound()


def _decode_image(question: DecodeImage, texts: Sequence[str]) -> ImageDecoded:
    from exo_mesh.text.image_decoding import decode_image

    if texts:
        question = msgspec.structs.replace(question, data=b64decode(texts[0]))
    return decode_image(question)


_questions: msgspec.json.Decoder[Question] = msgspec.json.Decoder(Question)


def _receive(pipe: BinaryIO) -> Question | None:
    """The next question; None once the node has closed its end of the pipe."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = pipe.read(length)
    return _questions.decode(body) if len(body) == length else None


def _send(pipe: BinaryIO, answer: Answer) -> bool:
    """Send an answer, or a refusal if it cannot be sent. Returns whether further parts of the answer may follow."""
    is_refused = False
    try:
        message = frame(answer)
    except UnicodeEncodeError:
        message = frame(TemplateRefused("the model's chat template outputs a lone surrogate (U+D800 to U+DFFF)"))
        is_refused = True
    pipe.write(message)
    pipe.flush()
    return not is_refused


def _short(text: str) -> str:
    """Make a text fit for an error message: bounded, and without lone surrogates."""
    return text[:MAX_MESSAGE].encode("utf-8", "replace").decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
