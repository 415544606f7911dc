"""Bodies with long texts are decoded like all others, without holding the interpreter for long."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest

from exo_mesh.api.anthropic.schema import decode_messages_body
from exo_mesh.api.decoding import convert_part, decode_body
from exo_mesh.api.ollama.lenient import decode_ollama_body
from exo_mesh.api.ollama.schema import OllamaChatBody
from exo_mesh.api.openai.schema import ChatBody, decode_generation_body
from exo_mesh.api.responses.items import MessageItem
from exo_mesh.api.responses.schema import decode_responses_body
from exo_mesh.base.long_texts import LONG, SLICE
from exo_mesh.errors import InputError
from tests.api.scripted_mesh import Served

Level = Literal["x"]
TEXT = 'a "quoted" line\n' * (2 * LONG // 16)


def body_of(content: Any, **fields: Any) -> bytearray:
    return bytearray(json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode())


def test_a_body_with_a_long_text_gives_the_same_as_one_with_a_short_text() -> None:
    fields = {"logit_bias": {"5": 1, "6": 2.5}, "max_tokens": 5.0, "audio": None, "stop": ["a"], "temperature": 1}
    short = decode_generation_body(body_of("a", **fields), ChatBody)
    long = decode_generation_body(body_of(TEXT, **fields), ChatBody)
    assert long.messages[0].content == TEXT
    long.messages[0].content = "a"
    assert long == short


def test_mistakes_in_a_body_with_a_long_text_are_named_shortly() -> None:
    for fields, word in (({"stop": {TEXT: 1}}, "stop"), ({"temperature": TEXT}, "temperature"), ({TEXT: 1}, "support")):
        with pytest.raises(InputError, match=word) as found:
            decode_generation_body(body_of(TEXT, **fields), ChatBody)
        assert len(str(found.value)) < 2500
    with pytest.raises(InputError, match="not UTF-8"):
        decode_body(b'["%b\xff"]' % TEXT.encode().replace(b'"', b"").replace(b"\n", b""), list[str])


def test_no_library_gets_a_long_text_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = msgspec.json.decode

    def noted(data: bytes, **options: Any) -> Any:
        sizes.append(len(data))
        return decode(data, **options)

    monkeypatch.setattr(msgspec.json, "decode", noted)
    decode_generation_body(body_of(TEXT, user=TEXT, audio=None), ChatBody)
    assert max(sizes) < SLICE + 100


def test_half_a_character_is_named_behind_a_million_escapes() -> None:
    text = b"\\n" * 1_000_000
    for body, place in ((b'["%b \\ud83d a"]' % text, 3 + len(text)), (b'["%b", "\\ud83d a"]' % text, 6 + len(text))):
        with pytest.raises(InputError, match=rf"\\ud83d \(byte {place}\) is half of a surrogate pair"):
            decode_body(body, list[str])
    with pytest.raises(InputError, match="not valid JSON"):
        decode_body(b'["%b", ' % text, list[str])


@pytest.mark.parametrize(
    ("decode", "body", "message"),
    [
        (
            lambda body: decode_generation_body(body, ChatBody),
            {"messages": [{"role": "function", "content": "x"}]},
            'messages[0].role is "function"; it must be "developer" or "system" or "user" or "assistant" or "tool"',
        ),
        (
            lambda body: decode_generation_body(body, ChatBody),
            {"messages": [], "tool_choice": "any"},
            'tool_choice is "any"; it must be "none" or "auto" or "required"',
        ),
        (
            lambda body: decode_generation_body(body, ChatBody),
            {"messages": [], "tools": [{"type": "web_search"}]},
            'tools[0].type is "web_search"; it must be "function"',
        ),
        (
            lambda body: decode_generation_body(body, ChatBody),
            {"messages": [], "verbosity": "x" * 500},
            f'verbosity is "{"x" * 56}...; it must be "low" or "medium" or "high"',
        ),
        (
            decode_responses_body,
            {"input": "x", "text": {"format": {"type": "it's"}}},
            'text.format.type is "it\'s"; it must be "text" or "json_object" or "json_schema"',
        ),
        (
            decode_messages_body,
            {"max_tokens": 1, "messages": [], "thread": {"type": "end"}},
            'thread.type is "end"; it must be "create" or "continue"',
        ),
        (
            lambda body: decode_ollama_body(body, OllamaChatBody),
            {"model": "m", "think": "most"},
            'think is "most"; it must be "low" or "medium" or "high"',
        ),
        (
            lambda body: convert_part(json.loads(body), MessageItem, "input[3]"),
            {"role": "tool", "content": "x"},
            'input[3].role is "tool"; it must be "user" or "system" or "developer" or "assistant"',
        ),
        (lambda body: decode_body(body, dict[str, list[Level]]), {"a.b": ["c"]}, '[...][0] is "c"; it must be "x"'),
    ],
)
def test_a_wrong_word_is_answered_with_the_allowed_ones(
    decode: Callable[[bytes], object], body: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as found:
        decode(json.dumps(body).encode())
    assert str(found.value) == message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/tokenize"])
async def test_a_byte_order_mark_before_a_body_changes_nothing(api: Served, path: str) -> None:
    said = {"messages": [{"role": "user", "content": "Hi"}]}
    body = {"/v1/messages": {"max_tokens": 5, **said}, "/v1/responses": {"input": "Hi"}}.get(path, said)
    for mark in (b"", b"\xef\xbb\xbf"):
        async with api.http.post(path, data=mark + json.dumps(body).encode()) as reply:
            assert reply.status == 200, await reply.text()


@pytest.mark.parametrize("body", [b"", b" \n", b"\xef\xbb\xbf"])
def test_an_empty_body_is_called_empty(body: bytes) -> None:
    with pytest.raises(InputError, match=r"^the request body is not valid JSON: it is empty$"):
        decode_generation_body(body, ChatBody)
