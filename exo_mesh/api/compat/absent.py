"""Answers 501 with the reason on routes that other programs have and exo-mesh does not."""

from __future__ import annotations

from aiohttp import web

from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import plain_error

_NO_IMAGES = (
    "exo-mesh makes no images, because its engines run language models only; "
    "send this request to a server for image models"
)
_NO_IMAGE_BENCH = (
    "exo-mesh makes no images, so there is nothing to measure; POST /bench/chat/completions measures a conversation"
)
_NO_STORED_IMAGES = "this node makes and keeps no images; send an image with the message that is about it"
_NO_FILES = (
    "the API shows no files of this machine, so that callers cannot look around on its disk; "
    "GET /v1/models lists the models, and --models-dir adds a directory of models"
)
ABSENT: dict[tuple[str, str], str] = {
    ("POST", "/v1/images/generations"): _NO_IMAGES,
    ("POST", "/v1/images/edits"): _NO_IMAGES,
    ("POST", "/bench/images/generations"): _NO_IMAGE_BENCH,
    ("POST", "/bench/images/edits"): _NO_IMAGE_BENCH,
    ("GET", "/images/{id}"): _NO_STORED_IMAGES,
    ("GET", "/filesystem/browse"): _NO_FILES,
}
"""The sentence of each route, by method and path."""

OLLAMA_ABSENT: dict[str, str] = {
    "/api/create": "exo-mesh does not create models; it serves models as their authors published them",
    "/api/copy": "exo-mesh does not copy models; a card can give a model further names (docs/reference/cards.md)",
    "/api/push": "exo-mesh does not publish models",
}
"""The same for routes of Ollama (POST), by path; each is also below /ollama."""


class AbsentRoutes:
    """Handles the routes that do not exist here."""

    def __init__(self, context: ApiContext) -> None:
        """Needs nothing of the context."""

    async def refuse(self, request: web.Request) -> web.Response:
        """Answer with the sentence of the route."""
        resource = request.match_info.route.resource
        assert resource is not None
        method = "GET" if request.method == "HEAD" else request.method
        path = resource.canonical
        why = ABSENT.get((method, path)) or OLLAMA_ABSENT[path.removeprefix("/ollama")]
        return plain_error("not_implemented", why)
