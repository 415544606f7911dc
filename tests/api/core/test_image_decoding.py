"""Image files from strangers are decoded in a child process: bombs are refused, and the node stays small."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import AsyncIterator

import psutil
import pytest

pytest.importorskip("PIL")

from PIL import Image

from exo_mesh.api.core.templates import TemplateRenderer
from exo_mesh.errors import InputError
from exo_mesh.text.image_wire import MAX_SOURCE_BYTES, ImageRecipe

EXACT = ImageRecipe("exact", 8, 8)
GRID = ImageRecipe("grid", factor=28, min_pixels=3136, max_pixels=1003520)


@pytest.fixture
async def renderer() -> AsyncIterator[TemplateRenderer]:
    made = TemplateRenderer()
    yield made
    await made.close()


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png_bomb(width: int, height: int) -> bytes:
    """A valid PNG of one colour: 1 bit per pixel, packed a thousandfold."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes((width + 7) // 8 + 1) * height, 9)
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
async def test_the_usual_formats_are_read(renderer: TemplateRenderer, kind: str) -> None:
    found = await renderer.decode_image(file_of(Image.new("RGB", (20, 10), (200, 100, 50)), kind), EXACT, "x")
    assert (found.height, found.width, len(found.pixels)) == (8, 8, 192)
    assert all(abs(got - want) < 12 for got, want in zip(found.pixels, (200, 100, 50), strict=False))


async def test_a_photo_is_turned_as_the_camera_was_held(renderer: TemplateRenderer) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    found = await renderer.decode_image(file_of(Image.new("RGB", (280, 56)), "JPEG", exif=exif), GRID, "x")
    assert (found.height, found.width) == (280, 56)


@pytest.mark.parametrize(("width", "height"), [(30, 30), (5000, 4000), (4000, 40), (1, 100)])
async def test_sides_become_multiples_within_the_bounds(renderer: TemplateRenderer, width: int, height: int) -> None:
    found = await renderer.decode_image(file_of(Image.new("L", (width, height))), GRID, "x")
    assert found.height % 28 == found.width % 28 == 0
    assert GRID.min_pixels <= found.height * found.width <= GRID.max_pixels


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (png_bomb(60_000, 60_000), "at most 36000000 are allowed"),
        (png_bomb(30_000, 100), "one side may be at most 200 times"),
        (file_of(Image.new("RGB", (64, 64)))[:60], "is not an image that can be read"),
        (b"%PDF-1.7 not an image", "is not an image that can be read"),
        (file_of(Image.new("RGB", (8, 8)), "TIFF"), "is not an image that can be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image that can be read"),
        (bytes(MAX_SOURCE_BYTES + 1), "are allowed for one image"),
    ],
    ids=["bomb", "line", "truncated", "pdf", "tiff", "svg", "long"],
)
async def test_a_hostile_file_is_refused_and_the_node_stays_small(
    renderer: TemplateRenderer, data: bytes, words: str
) -> None:
    await renderer.decode_image(file_of(Image.new("RGB", (8, 8))), EXACT, "x")
    before = psutil.Process().memory_info().rss
    for _ in range(3):
        with pytest.raises(InputError, match=words) as caught:
            await renderer.decode_image(data, EXACT, "messages[0]")
        assert caught.value.param == "messages[0]"
    assert psutil.Process().memory_info().rss - before < 100 << 20
    await renderer.decode_image(file_of(Image.new("RGB", (8, 8))), EXACT, "x")


async def test_a_large_photo_fits_into_the_process(renderer: TemplateRenderer) -> None:
    found = await renderer.decode_image(png_bomb(6000, 6000), EXACT, "x")
    assert found.width == 8
