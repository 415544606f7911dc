"""Messages between a node and its renderer or tokenizer process: each is JSON, preceded by its length in bytes.

They are JSON because a template's input came as JSON, so every number and text passes unchanged.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec

from exo_mesh.domain.images import CHANNELS, MAX_PIXELS
from exo_mesh.domain.request import GrammarKind
from exo_mesh.text.image_wire import DecodeImage, ImageDecoded
from exo_mesh.text.template import MAX_LENGTH, Message, TemplateTraits
from exo_mesh.text.token_table import TableHead, TablePart
from exo_mesh.text.tokenizer_bounds import TokenizerBounds

TokenizerMethod = Literal["encode_text", "encode_prompt", "encode_chat", "encode_for_vector", "check_length", "marked"]
"""Methods of TextModel that a child process can run."""

Framed = bytearray
"""A message as it is sent."""

LENGTH = struct.Struct(">I")
"""The length before each message, in bytes."""

MAX_ANSWER_BYTES = max(6 * MAX_LENGTH, 4 * CHANNELS * MAX_PIXELS // 3) + 4096
"""Most bytes of an answer. JSON needs at most six bytes for a character (an escaped control character), and four for
three bytes of pixels."""

EXIT_OUT_OF_MEMORY = 4
"""Exit code of a renderer process that ran out of memory while it read or answered a question."""


class CompileTemplate(msgspec.Struct, tag="compile", frozen=True):
    """Compile a template and keep it under its digest."""

    digest: str
    source: str
    where: str
    limit_s: float


class TryTemplate(msgspec.Struct, tag="try", frozen=True):
    """Find the traits of the template with this digest. variables: the special tokens that it may write."""

    digest: str
    variables: dict[str, Any]
    limit_s: float


class RenderTemplate(msgspec.Struct, tag="render", frozen=True):
    """Render the template with this digest. mark: of the stand-ins for the texts that were sent before; "" if there are
    none."""

    digest: str
    messages: list[Message]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    limit_s: float
    mark: str = ""


class CheckGrammar(msgspec.Struct, tag="grammar", frozen=True):
    """Check a grammar. kind and text: as in GrammarSpec; param: the field of the request that had the grammar."""

    kind: GrammarKind
    text: str
    param: str
    limit_s: float


class GivenText(msgspec.Struct, tag="part", frozen=True):
    """A part of a text of the next question: the text of UseTokenizer, the long texts of RenderTemplate by their index,
    or the data of DecodeImage in base64. It has no answer."""

    text: str
    index: int = 0


class ReadTokenizer(msgspec.Struct, tag="read_tokenizer", frozen=True):
    """Read the text files of a model, keep them, and return its table. base: the key of the files."""

    base: str
    directory: str
    limit_s: float


class OpenTokenizer(msgspec.Struct, tag="open_tokenizer", frozen=True):
    """Read the text files of a model, unless they are kept, and keep them under this key. base: the key of the files;
    written: what its chat template writes; None if it has none."""

    key: str
    base: str
    directory: str
    written: str | None
    limit_s: float


class UseTokenizer(msgspec.Struct, tag="use_tokenizer", frozen=True):
    """Call a method of the text model with this key. Its first argument is the text of the parts before; args: the
    others."""

    key: str
    method: TokenizerMethod
    args: list[Any]
    limit_s: float


class TokenizerOpened(msgspec.Struct, tag="tokenizer_opened", frozen=True):
    """The text files can be used."""


class TableAnswered(msgspec.Struct, tag="table", frozen=True):
    """The first part of a table, with head and bounds, or a further one. cpu_s: in the last part, the CPU time of the
    process for all of it."""

    head: TableHead | None = None
    bounds: TokenizerBounds | None = None
    part: TablePart | None = None
    cpu_s: float = 0.0
    is_last: bool = False


class TokenizerPart(msgspec.Struct, tag="tokenizer_part", frozen=True):
    """A part of a result: ids as integers of four bytes in the order of the machine, text, and one number. is_last: no
    further part follows."""

    ids: bytes = b""
    text: str = ""
    number: int = 0
    is_last: bool = True


class TokenizerRefused(msgspec.Struct, tag="tokenizer_refused", frozen=True):
    """The error of a method, as the code of its class, its message and its field. is_spent: as in TemplateRefused."""

    code: str
    message: str
    param: str | None = None
    is_spent: bool = False


class GrammarSound(msgspec.Struct, tag="sound", frozen=True):
    """The grammar can be used."""


class RendererReady(msgspec.Struct, tag="ready", frozen=True):
    """The first message of a renderer process."""


class TemplateCompiled(msgspec.Struct, tag="compiled", frozen=True):
    """The template can be used. variables: as in ChatTemplate."""

    variables: list[str]


class TemplateTried(msgspec.Struct, tag="tried", frozen=True):
    """What a template can do."""

    traits: TemplateTraits


class TemplateRendered(msgspec.Struct, tag="rendered", frozen=True):
    """The rendered prompt, or a part of it. is_last: no further part follows."""

    text: str
    is_last: bool = True


class TemplateRefused(msgspec.Struct, tag="refused", frozen=True):
    """The template cannot be compiled or refuses the messages, or the grammar cannot be used. param: the field of the
    request at fault. is_spent: the question used up the process's memory, so it may fail at further questions."""

    message: str
    param: str = "messages"
    is_spent: bool = False


class TemplateUnknown(msgspec.Struct, tag="unknown", frozen=True):
    """The process does not have the template or tokenizer: the node must send CompileTemplate or OpenTokenizer."""


TemplateQuestion = CompileTemplate | TryTemplate | RenderTemplate | CheckGrammar | DecodeImage
TokenizerQuestion = ReadTokenizer | OpenTokenizer | UseTokenizer
Question = TemplateQuestion | GivenText | TokenizerQuestion
Answer = (
    RendererReady
    | GrammarSound
    | ImageDecoded
    | TemplateCompiled
    | TemplateTried
    | TemplateRendered
    | TemplateRefused
    | TemplateUnknown
    | TableAnswered
    | TokenizerOpened
    | TokenizerPart
    | TokenizerRefused
)


def frame(message: Question | Answer) -> Framed:
    """Encode a message for the pipe, without a second copy of it. Raises UnicodeEncodeError for a lone surrogate."""
    framed = bytearray(LENGTH.size)
    _encoder.encode_into(message, framed, LENGTH.size)
    LENGTH.pack_into(framed, 0, len(framed) - LENGTH.size)
    return framed


_encoder = msgspec.json.Encoder()
