"""Compiles chat templates, which are untrusted code, and renders messages to one prompt text.

Only a renderer process (`template_child`) and tests may import this module. If a template escapes the sandbox's limits,
it uses that process's memory and time, not the node's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError

from exo_mesh.errors import InputError, ModelError
from exo_mesh.random_hex import random_digits
from exo_mesh.text.sandbox import compile_template, strftime, time_limit
from exo_mesh.text.template import MAX_LENGTH, RENDER_LIMIT_S, Message

MAX_VARIABLES = 1000
"""Most names that a template may read from outside; templates on the hub read fewer than 40."""


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
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
        mark = random_digits() if continue_final_message else ""
        names = {
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": _with_marked_end(messages, mark) if mark else list(messages),
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": strftime(now),
        }
        pieces: list[str] = []
        try:
            with time_limit(limit_s, clock):
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
        text = "".join(pieces)
        return _cut_at(mark, text, messages[-1]) if mark else text


def _with_marked_end(messages: Sequence[Message], mark: str) -> list[Message]:
    """The messages with a mark and a space at the end of the last one's text."""
    content = messages[-1].get("content") or ""
    if isinstance(content, str):
        marked: Any = f"{content}{mark} "
    else:
        marked = [*content[:-1], {**content[-1], "text": f"{content[-1].get('text', '')}{mark} "}]
    return [*messages[:-1], {**messages[-1], "content": marked}]


def _cut_at(mark: str, text: str, last: Message) -> str:
    """Cut the prompt at the mark. Where the template strips a message, its white space before the mark is cut as well.
    Raises InputError."""
    end = text.rfind(mark)
    if end < 0:
        raise InputError(
            "the chat template does not show the text of the last message, so it cannot be continued",
            param="continue_final_message",
        )
    content = last.get("content") or ""
    said = content if isinstance(content, str) else str(content[-1].get("text", ""))
    is_stripped = not text.startswith(" ", end + len(mark))
    return text[:end].removesuffix(said[len(said.rstrip()) :]) if is_stripped else text[:end]
