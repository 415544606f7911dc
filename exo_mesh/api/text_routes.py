"""Handlers that turn text into tokens, tokens into text, and conversations into prompts, without running a model.

`/tokenize` and `/detokenize` support the fields of both llama.cpp and vLLM. The fields of the body select one of them,
and the reply has the fields of both.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from exo_mesh.api.body import read_as, run_apart
from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.prompt_tokens import MAX_TOKENS, PromptTokens
from exo_mesh.api.core.request import Conversation, FieldNames
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.errors import json_response
from exo_mesh.api.openai.checks import check_body
from exo_mesh.api.openai.schema import ChatBody, Message, ToolBody, decode_generation_body
from exo_mesh.api.openai.translate import neutral_chat
from exo_mesh.errors import InputError
from exo_mesh.text.control_text import ChatPrompt
from exo_mesh.text.tokenizer import TextModel

B = TypeVar("B")

_NAMES = FieldNames()


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize. Exactly one of content (llama.cpp), prompt and messages (vLLM) is required."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolBody] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenPiece(msgspec.Struct):
    """A token and its text, or its bytes if it is only part of a character."""

    id: int
    piece: str | list[int]


class TokenizeReply(msgspec.Struct):
    """The reply of /tokenize. tokens: objects if with_pieces is true, else ids. token_strs: the tokens as the
    vocabulary writes them, if return_token_strs is true."""

    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class DetokenizeReply(msgspec.Struct):
    """The text, under the field names of llama.cpp and of vLLM."""

    content: str
    prompt: str


class EncodedChat(msgspec.Struct):
    """The prompt of a conversation and its tokens. length: characters of encoded_prompt."""

    length: int
    num_tokens: int
    encoded_tokens: list[int]
    encoded_prompt: str


class PromptReply(msgspec.Struct):
    """The prompt that the chat template makes of a conversation."""

    prompt: str


class TextRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._instances = context.services.instances
        self._texts = context.texts
        self._prompts = PromptTokens(context)

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize"""
        body = await self._body(request, TokenizeBody)
        given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
        if len(given) != 1:
            raise InputError("send exactly one of content, prompt and messages", param=(given or ["prompt"])[0])
        if body.parse_special is False:
            message = "parse_special false is not supported: special tokens in a text are always recognised"
            raise InputError(message, param="parse_special")
        model, text = await self._prompts.model(request, body.model)
        limit = await self._instances.context_limit(model)
        source: str | ChatPrompt | None = body.content if body.content is not None else body.prompt
        if body.messages is not None:
            subject = await run_apart(request, partial(_conversation, body, body.messages))
            source = await self._prompts.prompt(subject, text, _NAMES)
        assert source is not None
        ids = await self._prompts.encode(text, source, limit, given[0], with_special=_wants_special(body))
        return json_response(
            TokenizeReply(
                [TokenPiece(one, _piece(text, one)) if body.with_pieces else one for one in ids],
                len(ids),
                limit,
                [text.tokenizer.id_to_token(one) or "" for one in ids] if body.return_token_strs else None,
            )
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize: decode tokens; special tokens become text."""
        body = await self._body(request, DetokenizeBody)
        _, text = await self._prompts.model(request, body.model)
        if len(body.tokens) > MAX_TOKENS:
            raise InputError(f"tokens has {len(body.tokens)} ids; at most {MAX_TOKENS} are allowed", param="tokens")
        for token_id in body.tokens:
            if not 0 <= token_id < 2**31 or text.tokenizer.id_to_token(token_id) is None:
                # Python cannot convert a very long integer to text
                shown = token_id if token_id.bit_length() < 64 else "a huge number"
                raise InputError(f"tokens contains {shown}, which is not a token id of this model", param="tokens")
        decoded = await self._texts.work(partial(_decode, text, body.tokens))
        return json_response(DetokenizeReply(decoded, decoded))

    async def encode_chat(self, request: web.Request) -> web.Response:
        """POST /v1/chat/token/encode: the prompt and tokens for a body of /v1/chat/completions."""
        model, text, prompt = await self._chat_prompt(request)
        limit = await self._instances.context_limit(model)
        ids = await self._prompts.encode(text, prompt, limit, "messages")
        return json_response(EncodedChat(len(prompt.text), len(ids), ids, prompt.text))

    async def apply_template(self, request: web.Request) -> web.Response:
        """POST /apply-template: the prompt for a body of /v1/chat/completions."""
        _, _, prompt = await self._chat_prompt(request)
        return json_response(PromptReply(prompt.text))

    async def _chat_prompt(self, request: web.Request) -> tuple[str, TextModel, ChatPrompt]:
        name, subject = await read_as(request, self._context.options.body_silence_s, _read_chat)
        model, text = await self._prompts.model(request, name)
        return model, text, await self._prompts.prompt(subject, text, _NAMES)

    async def _body(self, request: web.Request, kind: type[B]) -> B:
        return await read_as(request, self._context.options.body_silence_s, partial(decode_body, kind=kind))


def _read_chat(received: bytes) -> tuple[str | None, Conversation]:
    """The model and the conversation of a body."""
    body = decode_generation_body(received, ChatBody)
    check_body(body)
    subject = neutral_chat(body).subject
    assert isinstance(subject, Conversation)
    return body.model, subject


def _conversation(body: TokenizeBody, messages: list[Message]) -> Conversation:
    chat = ChatBody(
        messages=messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    check_body(chat)
    subject = neutral_chat(chat).subject
    assert isinstance(subject, Conversation)
    return subject


def _wants_special(body: TokenizeBody) -> bool:
    """Whether to add special tokens: as the client asks, else as the server with this field does. vLLM adds them around
    a prompt only."""
    asked = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    return body.prompt is not None if asked is None else asked


def _decode(text: TextModel, ids: list[int]) -> str:
    detokenizer = text.detokenizer(text.added_tokens)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def _piece(text: TextModel, token_id: int) -> str | list[int]:
    own = text.token_bytes(token_id)
    try:
        return own.decode()
    except UnicodeDecodeError:
        return list(own)
