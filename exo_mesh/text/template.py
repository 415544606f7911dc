"""Chat templates: where a model keeps its own, and messages to one prompt text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Template, TemplateError

from exo_mesh.errors import InputError, ModelError
from exo_mesh.model_files import exists, named, read_json_text, read_model_file, shown
from exo_mesh.text.sandbox import MAX_LENGTH, compile_template, strftime, time_limit

Message = dict[str, Any]

MAX_TEMPLATE_BYTES = 4 * MAX_LENGTH  # a character has at most four
RENDER_LIMIT_S = 5.0  # rendering a megabyte of conversation takes a fraction of it
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "range", "namespace"}
)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """One compiled template. source: its text, to ask what it makes use of."""

    source: str
    template: Template
    variables: frozenset[str]
    """Names that it reads from outside, such as `enable_thinking`."""

    @classmethod
    def compile(cls, source: str, where: str) -> ChatTemplate:
        """Raises ModelError naming `where` if it is no template."""
        if len(source) > MAX_LENGTH:
            raise ModelError(f"{where}: the chat template has {len(source)} characters")
        try:
            template, names = compile_template(source)
        except (TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as exc:
            raise ModelError(f"{where}: the chat template cannot be used: {exc}") from exc
        return cls(source, template, names)

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
        """The prompt. It may take limit_s of pure computing: call it in a worker thread.

        Raises InputError with what the template says, or because it runs too long or makes too much.
        """
        names = {
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": list(messages),
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
        except (RecursionError, MemoryError) as exc:
            raise InputError("the model's chat template recurses or grows without end", param="messages") from exc
        text = "".join(pieces)
        return _cut_after_final_message(text, messages) if continue_final_message else text


def _cut_after_final_message(text: str, messages: Sequence[Message]) -> str:
    """The prompt up to the end of the last message's content, so that the model goes on inside it."""
    content = str(messages[-1].get("content") or "")
    start = text.rfind(content.strip()) if content.strip() else -1
    if start < 0:
        raise InputError(
            "continue_final_message: the chat template does not show the last message as it is",
            param="continue_final_message",
        )
    whole = content.lstrip()
    kept = whole if text.startswith(whole, start) else content.strip()
    return text[: start + len(kept)]


def find_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """A model's template: chat_template.jinja, else chat_template.json, else tokenizer_config.json; None without one.

    Of several named templates it is the one called "default". Raises ModelError.
    """
    jinja = directory / "chat_template.jinja"
    if exists(jinja):
        try:
            return ChatTemplate.compile(read_model_file(jinja, MAX_TEMPLATE_BYTES).decode("utf-8"), named(jinja))
        except (OSError, UnicodeDecodeError) as exc:
            raise ModelError(f"{named(jinja)}: cannot be read: {exc}") from exc
    where = directory / "chat_template.json"
    found = read_json(where).get("chat_template")
    if found is None:
        where = directory / "tokenizer_config.json"
        found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        by_name = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        if "default" not in by_name:
            names = shown(sorted(map(str, by_name)))
            raise ModelError(f"{named(where)}: none of the chat templates {names} is called 'default'")
        found = by_name["default"]
    if found is None:
        return None
    if not isinstance(found, str):
        raise ModelError(f"{named(where)}: chat_template is a {type(found).__name__}, not text")
    return ChatTemplate.compile(found, named(where))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} if there is no file. Raises ModelError."""
    try:
        value = msgspec.json.decode(read_json_text(path))
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelError(f"{named(path)}: cannot be read: {exc}") from exc
    if not isinstance(value, dict):
        raise ModelError(f"{named(path)}: holds no JSON object")
    return value
