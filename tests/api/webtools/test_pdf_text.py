"""The text of PDFs: what is read, what is refused, and that no PDF hurts the node."""

from __future__ import annotations

import asyncio
import os
import zlib
from pathlib import Path
from typing import Any

import psutil
import pytest

from exo_mesh.api.webtools.children import MAX_WAITING
from tests.api.scripted_mesh import Served


def pdf(*pages: bytes) -> bytes:
    """A PDF whose pages have these content streams."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * n) for n in range(len(pages)))
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(pages)),
               b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]  # fmt: skip
    for n, page in enumerate(pages):
        packed = zlib.compress(page)
        resources = b"/Resources<</Font<</F 3 0 R>>>>/MediaBox[0 0 600 800]"
        objects.append(b"<</Type/Page/Parent 2 0 R%s/Contents %d 0 R>>" % (resources, 5 + 2 * n))
        objects.append(b"<</Filter/FlateDecode/Length %d>>stream\n%s\nendstream" % (len(packed), packed))
    body, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return body + b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (
        len(objects) + 1, table, len(objects) + 1, len(body),
    )  # fmt: skip


def words(text: bytes) -> bytes:
    return b"BT /F 12 Tf 50 700 Td (%s) Tj ET" % text


async def sent(api: Served, body: bytes) -> tuple[int, dict[str, Any]]:
    async with api.http.post("/v1/tools/pdf_text", data=body, headers={"Content-Type": "application/pdf"}) as reply:
        return reply.status, await reply.json()


async def sent_to_library(
    api: Served, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, dict[str, Any]]:
    """What a node answers whose PDF library is this code."""
    (folder / "pypdf.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return await sent(api, pdf(words(b"x")))


async def test_a_body_that_is_no_pdf_is_refused_without_a_process(api: Served) -> None:
    status, answer = await sent(api, b"{" * 300_000)  # more values than a JSON body may have
    assert (status, answer["error"]["message"]) == (400, "the body is not a PDF")


async def test_a_node_without_the_library_says_how_to_install_it(
    api: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, answer = await sent_to_library(api, "raise ImportError", tmp_path, monkeypatch)
    assert status == 400 and 'pip install "exo-mesh[pdf]"' in answer["error"]["message"]


async def test_a_library_that_takes_too_much_memory_is_ended_and_the_node_goes_on(
    api: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os\nheld = bytes(1 << 31)\nos._exit(1)"
    status, answer = await sent_to_library(api, code, tmp_path, monkeypatch)
    assert (status, answer["error"]["message"][:22]) == (400, "the PDF cannot be read")
    assert not [one for one in psutil.Process().children(recursive=True) if "pdf_child" in " ".join(one.cmdline())]


@pytest.mark.extended
async def test_more_pdfs_than_the_limit_get_a_429(api: Served) -> None:
    replies = await asyncio.gather(*(sent(api, pdf(words(b"x"))) for _ in range(MAX_WAITING + 4)))
    assert [status for status, _ in replies].count(429) == 4


async def test_the_text_of_all_pages_is_read(api: Served) -> None:
    pytest.importorskip("pypdf")
    status, answer = await sent(api, pdf(words(b"Hello mesh"), words(b""), words(b"second page")))
    assert (status, answer) == (200, {"text": "Hello mesh\n\nsecond page", "pages": 3, "truncated": False})


@pytest.mark.extended
@pytest.mark.parametrize(
    "body", [b"%PDF-1.4\n" + b"1 0 obj<<" * 99_999, pdf(words(b"(" * 999_999)), pdf(b"q " * 9_999_999)]
)
async def test_a_pdf_that_is_written_to_exhaust_a_parser_ends_in_an_answer(api: Served, body: bytes) -> None:
    pytest.importorskip("pypdf")
    status, _ = await sent(api, body)
    assert status in (200, 400)
    assert not [one for one in psutil.Process().children(recursive=True) if "pdf_child" in " ".join(one.cmdline())]
