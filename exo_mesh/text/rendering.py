"""Compiles chat templates, which are untrusted code, and renders messages to one prompt text.

Only a renderer process (`template_child`) and tests may import this module. If a template escapes the sandbox's limits,
it uses that process's memory and time, not the node's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from jinja2 import Template, TemplateError

from exo_mesh.base.printable import random_digits
from exo_mesh.errors import InputError, ModelError
from exo_mesh.text.probes import traits_of
from exo_mesh.text.sandbox import compile_template, strftime, time_limit
from exo_mesh.text.template import MAX_LENGTH, RENDER_LIMIT_S, Message, TemplateTraits

MAX_VARIABLES = 1000
"""Most names that a template may read from outside; templates on the hub read fewer than 40."""


class CompiledTemplate(msgspec.Struct, frozen=True):
    """One template, ready to render."""

    template: Template
    variables: frozenset[str]
    """Names that the template reads from outside, such as `enable_thinking`."""

    @classmethod
    def compile(cls, source: str, where: str) -> CompiledTemplate:
        """Compile a template. Raises ModelError, naming `where`, if it cannot be used."""
        try:
            template, names = compile_template(source)
        except (TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as exc:
            raise ModelError(f"{where}: the chat template cannot be used: {exc}") from exc
        except MemoryError as exc:
            raise ModelError(f"{where}: the chat template needs too much memory to compile") from exc
        if len(names) > MAX_VARIABLES:
            raise ModelError(
                f"{where}: the chat template reads {len(names)} variables; at most {MAX_VARIABLES} are allowed"
            )
        return cls(template, names)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        now: Callable[[], datetime] = datetime.now,
        limit_s: float = RENDER_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> str:
        """Render the messages to a prompt. It may take limit_s, or longer if the sandbox has a gap.

        continue_final_message: end the prompt inside the last message, so that the model continues that message.

        Raises InputError if the template refuses the messages, runs too long or makes a value that is too large.
        """
        names = {
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": strftime(now),
        }
        with time_limit(limit_s, clock):
            if not continue_final_message:
                return self._text(names)
            said = _said_last(messages)
            text, is_stripped = self._until_end(names, messages, said)
            if is_stripped and said != said.rstrip():
                text, _ = self._until_end(names, messages, said.rstrip())
            return text

    def _until_end(self, names: Mapping[str, Any], messages: Sequence[Message], said: str) -> tuple[str, bool]:
        """The prompt up to the end of the last message, which says this; and whether the template strips messages.
        Raises InputError if it hides the message."""
        mark = random_digits()
        text = self._text({**names, "messages": _ending_with(messages, f"{said}{mark} ")})
        end = text.rfind(mark)
        if end < 0:
            raise InputError(
                "the chat template does not show the text of the last message, so it cannot be continued",
                param="continue_final_message",
            )
        return text[:end], not text.startswith(" ", end + len(mark))

    def _text(self, names: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        try:
            length = 0
            for piece in self.template.generate(names):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_LENGTH:
                    raise InputError(
                        f"the prompt is longer than {MAX_LENGTH} characters once the chat template is applied",
                        param="messages",
                    )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as exc:
            raise InputError(f"the model's chat template refuses these messages: {exc}", param="messages") from exc
        except RecursionError as exc:
            raise InputError("the model's chat template recurses too deeply", param="messages") from exc
        except MemoryError as exc:
            raise InputError("the model's chat template needs too much memory", param="messages") from exc
        return "".join(pieces)

    def traits(
        self,
        variables: Mapping[str, Any],
        limit_s: float = RENDER_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> TemplateTraits:
        """What the template can do, found by probes that may take limit_s all together. variables: special tokens.

        Raises InputError if it takes longer or needs too much memory.
        """
        end = clock() + limit_s

        def render(messages: Sequence[Message], further: Mapping[str, Any]) -> str | None:
            if (left := end - clock()) <= 0:
                raise InputError("the model's chat template runs too long for small conversations", param="messages")
            try:
                return self.render(messages, variables={**variables, **further}, limit_s=left, clock=clock)
            except InputError as exc:
                if isinstance(exc.__cause__, MemoryError):
                    raise
                return None

        return traits_of(render)


def _said_last(messages: Sequence[Message]) -> str:
    """The text of the last message, or of its last part."""
    content = messages[-1].get("content") or ""
    return content if isinstance(content, str) else str(content[-1].get("text", ""))


def _ending_with(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with this text in the last one, or in its last part."""
    content: Any = messages[-1].get("content") or ""
    content = text if isinstance(content, str) else [*content[:-1], {**content[-1], "text": text}]
    return [*messages[:-1], {**messages[-1], "content": content}]
