"""Images in the bodies of all dialects become parts of neutral turns, or are refused by name."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from exo_mesh.api.anthropic.messages import turns_of as of_anthropic
from exo_mesh.api.anthropic.schema import CountTokensBody
from exo_mesh.api.core.conversation import joined_turns, template_messages
from exo_mesh.api.core.image_inputs import image_of_base64, image_of_url
from exo_mesh.api.core.request import ImageInput, Turn
from exo_mesh.api.decoding import convert_part
from exo_mesh.api.ollama.messages import turns_of as of_ollama
from exo_mesh.api.ollama.schema import OllamaGenerateBody, OllamaMessage
from exo_mesh.api.ollama.translate import neutral_generate
from exo_mesh.api.openai.messages import turns_of as of_openai
from exo_mesh.api.openai.schema import Message
from exo_mesh.api.responses.turns import turns_of as of_responses
from exo_mesh.base.long_texts import SLICE
from exo_mesh.errors import InputError
from exo_mesh.text.rendering import CompiledTemplate
from exo_mesh.text.text_guard import TextGuard

DATA = base64.b64encode(b"an image").decode()
URL = f"data:image/png;base64,{DATA}"


def shown(turn: Turn) -> list[str]:
    """The parts of a turn, with an image as its bytes in brackets."""
    return [part if isinstance(part, str) else f"<{part.data.decode()}>" for part in turn.parts]


def openai(*parts: dict[str, Any], role: str = "user") -> tuple[Turn, ...]:
    return of_openai([convert_part({"role": role, "content": list(parts)}, Message, "messages[0]")])


def anthropic(*blocks: dict[str, Any]) -> tuple[Turn, ...]:
    body = {"messages": [{"role": "user", "content": list(blocks)}]}
    return of_anthropic(convert_part(body, CountTokensBody, ""))


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_images_of_openai_keep_their_places_between_texts() -> None:
    image = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    (turn,) = openai(text("a"), image, text("b"))
    assert shown(turn) == ["a", "<an image>", "b"] and turn.text == "a\nb"
    assert turn.images[0].where == "messages[0].content[1].image_url.url"


def test_images_of_responses_keep_their_places_between_texts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URL, "detail": "auto"}]
    (turn,) = of_responses([({"role": "user", "content": parts}, "input[0]")])
    assert shown(turn) == ["a", "<an image>"] and turn.text == "a"


def test_images_of_anthropic_keep_their_places_between_blocks() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    (turn,) = anthropic(image, text("a"), image, text("b"))
    assert [part for part in shown(turn) if part] == ["<an image>", "a", "<an image>", "b"]


def test_images_of_ollama_come_before_the_text() -> None:
    (turn,) = of_ollama([OllamaMessage(role="user", content="a", images=[DATA, URL])])
    assert shown(turn) == ["<an image>", "<an image>", "a"]
    asked = neutral_generate(OllamaGenerateBody(prompt="a", images=[DATA]))
    assert [shown(turn) for turn in asked.subject.turns] == [["<an image>", "a"]]  # type: ignore[union-attr]
    assert asked.subject.turns[0].images[0].where == "images[0]"  # type: ignore[union-attr]
    assert turn.images[1].where == "messages[0].images[1]"


def test_a_message_without_images_has_no_parts() -> None:
    (turn,) = openai(text("a"), text("b"))
    assert turn.parts == () and turn.text == "a\nb"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/a.png", "does not fetch addresses"),
        ("file:///etc/passwd", "does not fetch addresses"),
        ("data:image/png,abc", "data URLs in base64"),
        ("data:image/png;base64,a*b", "not valid base64"),
        ("data:image/png;base64,", "is empty"),
        (7, "must be a data URL"),
    ],
)
def test_any_other_address_of_an_image_is_refused_with_the_reason(url: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        image_of_url(url, "x.url")
    assert caught.value.param == "x.url"


def test_a_long_text_in_base64_is_decoded_as_a_whole() -> None:
    for size in (SLICE, 3 * SLICE + 1, 3 * SLICE + 2):
        data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        assert image_of_base64(base64.b64encode(data).decode(), "x").data == data
        assert image_of_base64(base64.encodebytes(data).decode(), "x").data == data
        for wrong in ("QQ==" + "QUJD" * size, "QUJD" * size + "QQ", "QUJD" * size + "?", "QUJD" * size + "é"):
            with pytest.raises(InputError, match="not valid base64"):
                image_of_base64(wrong, "x")


def test_a_huge_text_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(InputError, match="longer than an image"):
        image_of_base64("A" * (33 << 20), "x")


@pytest.mark.parametrize(
    ("part", "role", "words"),
    [
        ({"type": "input_audio", "input_audio": {}}, "user", "no model here takes audio"),
        ({"type": "image_url", "image_url": URL}, "assistant", '"text" is'),
        ({"type": "image_url", "image_url": URL}, "system", '"text" is'),
        ({"type": "image_url", "image_url": URL, "file_id": "f"}, "user", "keeps no files"),
        ({"type": "image_url", "image_url": URL, "x": 1}, "user", "does not support this field"),
    ],
)
def test_what_is_no_image_of_the_user_is_refused(part: dict[str, Any], role: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        openai(part, role=role)


@pytest.mark.parametrize("kind", ["url", "file"])
def test_a_source_of_anthropic_that_is_elsewhere_is_refused(kind: str) -> None:
    with pytest.raises(InputError, match='only as "base64"'):
        anthropic({"type": "image", "source": {"type": kind, "url": "https://example.com"}})


def test_turns_that_become_one_keep_the_order_of_their_images() -> None:
    image = ImageInput(b"an image", "x")
    joined = joined_turns([Turn("user", "a", ""), Turn("user", "b", "", parts=(image, "b"))])
    assert shown(joined) == ["a", "<an image>", "b"] and joined.text == "a\nb"
    assert joined_turns([Turn("user", "a", ""), Turn("user", "b", "")]).parts == ()


IN_PARTS = (
    "{% for m in messages %}{% if WHEN m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{% endfor %}"
)
BOTH = [{"type": "image"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "with_images", "without"),
    [
        (IN_PARTS.replace("WHEN", ""), BOTH, "a"),
        (IN_PARTS.replace("WHEN", "false and"), BOTH, [{"type": "text", "text": "a"}]),
        ("{{ messages[0]['content'] }}{# 'image' #}", "<mark>\nb", "a"),
        ("{{ messages | tojson }}", "<mark>\nb", "a"),
    ],
)
def test_a_template_gets_images_in_the_way_that_it_reads(source: str, with_images: Any, without: Any) -> None:
    turns = [Turn("user", "a", ""), Turn("user", "b", "", parts=(ImageInput(b"an image", "x"), "b"))]
    traits = CompiledTemplate.compile(source, "here").traits({})
    messages = template_messages(turns, traits, TextGuard(), "<mark>")
    assert [message["content"] for message in messages] == [without, with_images]
