"""What a node and the process that renders chat templates and checks grammars say to each other, as JSON behind its
length in bytes.

JSON, because what a template is given came as JSON: any number and text passes unchanged.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from exo_mesh.domain.grammar import GrammarKind
from exo_mesh.text.template import MAX_LENGTH, Message

LENGTH = struct.Struct(">I")
"""What stands before each message."""

MAX_ANSWER_BYTES = 6 * MAX_LENGTH + 4096
"""JSON writes a control character in six bytes, the longest for one character."""

EXIT_OUT_OF_MEMORY = 4
"""Exit code of a renderer process that had no memory left to read a question or to answer it."""


class CompileTemplate(msgspec.Struct, tag="compile", frozen=True):
    """Compile a template and keep it under its digest."""

    digest: str
    source: str
    where: str
    limit_s: float


class RenderTemplate(msgspec.Struct, tag="render", frozen=True):
    """Render the template with this digest."""

    digest: str
    messages: list[Message]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    limit_s: float


class CheckGrammar(msgspec.Struct, tag="grammar", frozen=True):
    """Is it a sound grammar? kind and text as of GrammarSpec; param: the field of the request that it came in."""

    kind: GrammarKind
    text: str
    param: str
    limit_s: float


class GrammarSound(msgspec.Struct, tag="sound", frozen=True):
    """It can be used."""


class RendererReady(msgspec.Struct, tag="ready", frozen=True):
    """The first message of a renderer process."""


class TemplateCompiled(msgspec.Struct, tag="compiled", frozen=True):
    """The template can be used; `variables` as of ChatTemplate."""

    variables: list[str]


class TemplateRendered(msgspec.Struct, tag="rendered", frozen=True):
    """The prompt."""

    text: str


class TemplateRefused(msgspec.Struct, tag="refused", frozen=True):
    """The template cannot be compiled or refuses the messages, or the grammar cannot be used. param: the field of the
    request at fault. is_spent: the process ran out of memory over it, and may have none left for other questions."""

    message: str
    param: str = "messages"
    is_spent: bool = False


class TemplateUnknown(msgspec.Struct, tag="unknown", frozen=True):
    """The process does not have the template: send it first."""


Question = CompileTemplate | RenderTemplate | CheckGrammar
Answer = RendererReady | GrammarSound | TemplateCompiled | TemplateRendered | TemplateRefused | TemplateUnknown


def frame(message: Question | Answer) -> bytes:
    """A message as it goes through the pipe. Raises UnicodeEncodeError for a lone surrogate."""
    body = msgspec.json.encode(message)
    return LENGTH.pack(len(body)) + body
