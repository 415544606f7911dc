"""Renders chat templates in child processes, because templates are untrusted code and must not slow down the node."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh.api.core.child_processes import ChildMemory, ChildProcesses
from exo_mesh.api.core.renderer_process import RendererLostError, RendererProcess
from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.long_texts import LongTexts, slices
from exo_mesh.base.printable import random_digits
from exo_mesh.domain.request import GrammarSpec
from exo_mesh.errors import InputError, ModelError
from exo_mesh.text.grammars import check_size
from exo_mesh.text.image_wire import MAX_SOURCE_BYTES, DecodeImage, ImageDecoded, ImageRecipe
from exo_mesh.text.recent_failures import RecentFailures
from exo_mesh.text.template import RENDER_LIMIT_S, ChatTemplate, Message
from exo_mesh.text.template_wire import (
    LENGTH,
    Answer,
    CheckGrammar,
    CompileTemplate,
    Framed,
    GivenText,
    Question,
    RenderTemplate,
    TemplateCompiled,
    TemplateRefused,
    TemplateRendered,
    TemplateTried,
    TemplateUnknown,
    TryTemplate,
    frame,
)

KILL_GRACE_S = 1.0
"""How much longer than its limit a question may take; the sandbox usually stops a template in time, with a reason."""

MEMORY = ChildMemory(growth_bytes=512 << 20, kept_bytes=128 << 20)
"""The longest prompt needs a quarter of this growth."""

LARGE_QUESTION = 1 << 18
"""Characters from which on the question of a conversation is encoded in a thread."""

DATA_PART = 3 << 14
"""Bytes that are sent at a time; a multiple of three, so that their texts in base64 can be joined."""

_log = logging.getLogger(__name__)


class _FramedQuestion(msgspec.Struct, frozen=True):
    """A question as it is sent, and the key of its failure. long: texts that are sent before it; data: bytes that are
    sent instead of a long text."""

    framed: Framed
    key: bytes
    long: LongTexts
    data: bytes = b""

    def parts(self) -> Iterator[Framed]:
        """The messages of the question, made one by one."""
        for start in range(0, len(self.data), DATA_PART):
            yield frame(GivenText(b64encode(self.data[start : start + DATA_PART]).decode()))
        for index in range(len(self.long)):
            for part in slices(self.long[index]):
                yield frame(GivenText(part, index))
        yield self.framed


def _framed(question: RenderTemplate) -> Framed:
    """Encode a question with many messages one message at a time. Raises UnicodeEncodeError for a lone surrogate."""
    place = random_digits()
    framed = frame(msgspec.structs.replace(question, messages=[{place: 0}]))
    head, tail = framed.split(f'{{"{place}":0}}'.encode())
    for index, message in enumerate(question.messages):
        head += b"," * (index > 0) + msgspec.json.encode(message)
    head += tail
    LENGTH.pack_into(head, 0, len(head) - LENGTH.size)
    return head


def _asked(question: Question, long: LongTexts | None = None, data: bytes = b"") -> _FramedQuestion:
    """Encode a question. It blocks for a long one. Raises UnicodeEncodeError for a lone surrogate."""
    long = LongTexts() if long is None else long
    framed = _framed(question) if isinstance(question, RenderTemplate) else frame(question)
    digest = hashlib.blake2b(framed, digest_size=16)
    digest.update(data)
    for index in range(len(long)):
        for part in slices(long[index]):
            digest.update(part.encode())
    return _FramedQuestion(framed, digest.digest(), long, data)


class TemplateRenderer:
    """Owns the renderer processes of a node and sends them questions."""

    def __init__(self, limit_s: float = RENDER_LIMIT_S, *, clock: Clock = monotonic) -> None:
        """limit_s: time limit for one question."""
        self._limit_s = limit_s
        self._children = ChildProcesses("chat templates and grammars", MEMORY, clock)
        self._failures = RecentFailures()
        self._mark = random_digits()  # always the same, so that the same question has the same key

    @property
    def pids(self) -> set[int]:
        """The pids of the processes that have not ended."""
        return self._children.pids

    async def compile(self, template: ChatTemplate) -> ChatTemplate:
        """Compile a template in a process; returns the template with its variables filled in.

        Raises ModelError if it cannot be used, NotReadyError if no process starts, DeadlineError if all stay busy.
        """
        self._failures.recall(template.digest.encode())
        try:
            async with self._children.lend(template.digest) as process:
                return replace(template, variables=await self._compile(process, template))
        except RendererLostError as exc:
            error = ModelError(f"{template.where}: the chat template {exc}")
            self._failures.note(template.digest.encode(), error)
            raise error from exc

    async def try_out(self, template: ChatTemplate, variables: Mapping[str, Any]) -> ChatTemplate:
        """Find what a template can do; returns it with its traits. variables: the special tokens of the model. A
        template that cannot be tried keeps the default traits. Raises NotReadyError and DeadlineError, as `compile`."""
        try:
            answer = await self._answer(template, _asked(TryTemplate(template.digest, dict(variables), self._limit_s)))
        except InputError as exc:
            _log.warning("%s: the chat template cannot be tried: %s", template.where, exc)
            return template
        if isinstance(answer, TemplateRefused):
            _log.warning("%s: the chat template cannot be tried: %s", template.where, answer.message)
            return template
        assert isinstance(answer, TemplateTried)
        return replace(template, traits=answer.traits, is_tried=True)

    async def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt. Raises InputError if the template refuses the messages or fails, else as `compile`."""
        long = LongTexts(self._mark)

        def encode() -> _FramedQuestion:
            names = long.out_of(dict(variables or {}))
            said = long.out_of(list(messages))
            flags = add_generation_prompt, continue_final_message
            mark = long.mark if len(long) else ""
            return _asked(RenderTemplate(template.digest, said, *flags, names, self._limit_s, mark), long)

        try:
            is_large = sum(len(message.get("content") or "") for message in messages) > LARGE_QUESTION
            asked = await asyncio.to_thread(encode) if is_large else encode()
        except UnicodeEncodeError as exc:
            raise InputError("the text contains a lone surrogate (U+D800 to U+DFFF)", param="messages") from exc
        self._failures.recall(asked.key)
        answer = await self._answer(template, asked)
        if isinstance(answer, TemplateRefused):
            raise self._noted(asked, answer.message, answer.param)
        assert isinstance(answer, TemplateRendered)
        return answer.text

    async def check_grammar(self, spec: GrammarSpec, param: str = "response_format") -> None:
        """Check that drivers can enforce a grammar. Raises InputError with the reason; other errors as `compile`.

        Only one grammar is checked at a time, so a hostile one occupies one process for at most the time limit.
        """
        check_size(spec, param)
        asked = _asked(CheckGrammar(spec.kind, spec.text, param, self._limit_s))
        self._failures.recall(asked.key)
        async with self._children.lend("grammar") as process:
            self._failures.recall(asked.key)  # the same grammar may have failed while this one waited
            try:
                answer = await process.ask(asked.framed, self._limit_s + KILL_GRACE_S)
            except RendererLostError as exc:
                raise self._noted(asked, f"the grammar {exc}", param) from exc
        if isinstance(answer, TemplateRefused):
            raise self._noted(asked, answer.message, answer.param)

    def _noted(self, asked: _FramedQuestion, message: str, param: str | None) -> InputError:
        """The error of a question, which is remembered for a minute."""
        error = InputError(message, param=param)
        self._failures.note(asked.key, error)
        return error

    async def decode_image(self, data: bytes, recipe: ImageRecipe, where: str) -> ImageDecoded:
        """Decode and resize an image file. where: its place in the client's body. Raises InputError with the reason;
        other errors as `compile`.

        Only one image is decoded at a time, so hostile ones occupy one process for at most the time limit.
        """
        if len(data) > MAX_SOURCE_BYTES:
            text = f"{where} has {len(data)} bytes; at most {MAX_SOURCE_BYTES} are allowed for one image"
            raise InputError(text, param=where)
        question = DecodeImage(b"", recipe, where, self._limit_s)
        asked = await asyncio.to_thread(partial(_asked, question, data=data))
        self._failures.recall(asked.key)
        async with self._children.lend("image") as process:
            try:
                (answer,) = await process.ask_in_parts(asked.parts(), self._limit_s + KILL_GRACE_S)
            except RendererLostError as exc:
                raise self._noted(asked, f"{where}: the image {exc}", where) from exc
        if isinstance(answer, TemplateRefused):
            raise InputError(answer.message, param=answer.param)
        assert isinstance(answer, ImageDecoded)
        return answer

    def end_idle(self, now: float) -> float:
        """See ChildProcesses.end_idle."""
        return self._children.end_idle(now)

    async def close(self) -> None:
        """End all processes. Waiting questions get an error."""
        await self._children.close()

    async def _compile(self, process: RendererProcess, template: ChatTemplate) -> frozenset[str]:
        """Compile a template in this process; returns the names that it reads. Raises ModelError, RendererLostError."""
        try:
            question = frame(CompileTemplate(template.digest, template.source, template.where, self._limit_s))
            answer = await self._ask(process, [question], template)
        except UnicodeEncodeError as exc:
            raise ModelError(f"{template.where}: the chat template contains a lone surrogate") from exc
        if isinstance(answer, TemplateRefused):
            raise ModelError(answer.message)
        assert isinstance(answer, TemplateCompiled)
        return frozenset(answer.variables)

    async def _answer(self, template: ChatTemplate, asked: _FramedQuestion) -> Answer:
        """The answer to a question about a template, which is compiled first if the process does not have it. Raises
        InputError if the process is lost."""
        async with self._children.lend(template.digest) as process:
            self._failures.recall(asked.key)  # the same question may have failed while this one waited
            try:
                answer = await self._ask(process, asked.parts(), template)
                if isinstance(answer, TemplateUnknown):
                    await self._compile(process, template)
                    answer = await self._ask(process, asked.parts(), template)
            except RendererLostError as exc:
                raise self._noted(asked, f"the model's chat template {exc}", "messages") from exc
        return answer

    async def _ask(self, process: RendererProcess, question: Iterable[Framed], template: ChatTemplate) -> Answer:
        try:
            answers = await process.ask_in_parts(question, self._limit_s + KILL_GRACE_S)
        except RendererLostError as exc:
            _log.warning("%s: the chat template %s; its renderer process was killed", template.where, exc)
            raise
        if isinstance(last := answers[-1], TemplateRendered) and len(answers) > 1:
            return TemplateRendered("".join(part.text for part in answers if isinstance(part, TemplateRendered)))
        return last
