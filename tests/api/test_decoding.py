"""Bodies with long texts are decoded like all others, without holding the interpreter for long."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from exo_mesh.api.decoding import decode_body
from exo_mesh.api.openai.schema import ChatBody, decode_generation_body
from exo_mesh.base.long_texts import LONG, SLICE
from exo_mesh.errors import InputError

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
