"""Images in the chat of the page: chosen and dropped where the model takes them, kept with the conversation."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

from tests.api.scripted_mesh import Served
from tests.page.chromium import choose_model, conversations, needs_chromium, page_at

pytestmark = needs_chromium

MODELS = {
    "object": "list",
    "data": [
        {"id": "sees", "status": "loaded", "capabilities": {"modalities": {"input": ["text", "image"]}}},
        {"id": "reads", "status": "loaded", "capabilities": {"modalities": {"input": ["text"]}}},
    ],
}


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + bytes(width * 3)) * height)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


async def with_models(page: Any) -> None:
    """Lets the page see MODELS, and chooses the one that takes images."""
    await page.route("**/v1/models", lambda route: route.fulfill(json=MODELS))
    await page.reload()
    await choose_model(page, "sees")


async def test_an_image_is_sent_and_shown_and_kept(api: Served) -> None:
    async with page_at(api.url) as page:
        await with_models(page)
        async with page.expect_file_chooser() as chooser:
            await page.get_by_role("button", name="Attach files").click()
        file = await chooser.value
        await file.set_files([{"name": "a.png", "mimeType": "image/png", "buffer": png(3000, 1000)}])
        await page.get_by_role("img", name="Image 1").wait_for()
        await page.get_by_label("Write a message").fill("What is it?")
        async with page.expect_request("**/v1/chat/completions") as asked:
            await page.keyboard.press("Enter")
        body = json.loads((await asked.value).post_data)
        image, text = body["messages"][0]["content"]
        assert text == {"type": "text", "text": "What is it?"}
        url = image["image_url"]["url"]
        assert image["type"] == "image_url" and url.startswith("data:image/jpeg;base64,")
        assert await page.locator(".message.user img").evaluate("one => [one.naturalWidth, one.naturalHeight]") == [
            1536,
            512,
        ]
        (kept,) = await conversations(page)
        assert kept["messages"][0] == {"role": "user", "content": "What is it?", "images": [url]}


async def test_a_model_that_takes_no_images_refuses_them(api: Served) -> None:
    async with page_at(api.url) as page:
        await with_models(page)
        await choose_model(page, "reads")
        data = await page.evaluate_handle(
            "bytes => { const data = new DataTransfer();"
            " data.items.add(new File([new Uint8Array(bytes)], 'a.png', { type: 'image/png' })); return data; }",
            list(png(4, 4)),
        )
        await page.dispatch_event(".composer", "drop", {"dataTransfer": data})
        await page.get_by_text("This model takes no images.").wait_for()


async def test_a_dropped_image_can_be_removed_again(api: Served) -> None:
    async with page_at(api.url) as page:
        await with_models(page)
        data = await page.evaluate_handle(
            "bytes => { const data = new DataTransfer();"
            " data.items.add(new File([new Uint8Array(bytes)], 'a.png', { type: 'image/png' })); return data; }",
            list(png(4, 4)),
        )
        await page.dispatch_event(".composer", "drop", {"dataTransfer": data})
        await page.get_by_role("button", name="Remove image 1").click()
        assert await page.get_by_role("img", name="Image 1").count() == 0
