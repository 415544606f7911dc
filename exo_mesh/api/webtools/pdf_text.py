"""Handler for the text of a PDF that is attached to a message. Nothing of it is kept or logged, and no call leaves the
node, so this is on without `--web-tools`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from exo_mesh.api.body import read_body
from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response
from exo_mesh.api.webtools.children import WebChildren
from exo_mesh.api.webtools.pdf_child import LIMIT_S, PdfAnswer
from exo_mesh.errors import InputError

WALL_LIMIT_S = 2 * LIMIT_S
"""More than the limit of CPU time, because the machine may be busy."""
_WHY = {
    "missing": 'this node cannot read PDFs: pypdf is not installed; pip install "exo-mesh[pdf]" on its machine',
    "locked": "the PDF needs a password; remove the password, and send it again",
    "broken": "the PDF cannot be read; it may be damaged",
}


class PdfReply(msgspec.Struct):
    """The text of a PDF. truncated: pages or characters were left out."""

    text: str
    pages: int
    truncated: bool


class PdfRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._body_silence_s = context.options.body_silence_s
        self._children = WebChildren("exo_mesh.api.webtools.pdf_child", "PDFs are being read")

    async def pdf_text(self, request: web.Request) -> web.Response:
        """POST /v1/tools/pdf_text"""
        body = await read_body(request, self._body_silence_s, is_json=False)
        if b"%PDF-" not in body[:1024]:
            raise InputError("the body is not a PDF")
        found = await self._read(body)
        if found.error:
            raise InputError(_WHY[found.error])
        return json_response(PdfReply(found.text, found.num_pages, found.is_cut))

    async def _read(self, body: bytes) -> PdfAnswer:
        """Raises InputError if the PDF takes too much, NotReadyError and OverloadError."""
        try:
            return msgspec.json.decode(await self._children.ask(body, WALL_LIMIT_S), type=PdfAnswer)
        except (TimeoutError, msgspec.MsgspecError) as exc:
            raise InputError("the PDF cannot be read: it needs too much time or memory") from exc
