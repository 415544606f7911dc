"""The HTTP client of huggingface_hub, with a limit on the hub's answers, because the library reads whole answers."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory

from exo_mesh.base.clock import monotonic
from exo_mesh.errors import FetchError

FILE = "exo_mesh.file"
"""Extension of requests whose answers are read piece by piece, up to the requested length."""

MAX_ANSWER_BYTES = 16 * 2**20
"""Limit of every other answer. A listing of 40,000 files is this long; the largest repositories have some thousands."""


ANSWER_LIMIT_S = 30.0
"""Time limit of one such answer, however slowly it arrives."""


def use_bounded_client() -> None:
    """Sets the client for all requests of this process. Each thread creates its client at its first use of the hub."""
    set_client_factory(lambda: bounded(default_client_factory()))


def bounded(client: httpx2.Client) -> httpx2.Client:
    """Returns the same client, whose requests raise FetchError for answers that are compressed or too long."""
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], _ask_plainly],
        "response": [*hooks["response"], _bound],
    }
    return client


def _ask_plainly(request: httpx2.Request) -> None:
    request.headers["Accept-Encoding"] = "identity"


def _bound(response: httpx2.Response) -> None:
    if response.request.extensions.get(FILE) and response.status_code < 400:
        return
    if response.headers.get("Content-Encoding", "identity") not in ("", "identity"):
        raise FetchError("the hub sent a compressed answer to a request for an uncompressed one", is_final=True)
    if isinstance(response.stream, httpx2.SyncByteStream):
        response.stream = _Bounded(response.stream)


class _Bounded(httpx2.SyncByteStream):
    """The same bytes, up to MAX_ANSWER_BYTES and for ANSWER_LIMIT_S. Raises FetchError beyond these limits."""

    def __init__(self, stream: httpx2.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        left, end = MAX_ANSWER_BYTES, monotonic() + ANSWER_LIMIT_S
        for piece in self._stream:
            left -= len(piece)
            if left < 0:
                raise FetchError(f"an answer of the hub has more than {MAX_ANSWER_BYTES} bytes", is_final=True)
            if monotonic() > end:
                raise FetchError(f"an answer of the hub takes more than {ANSWER_LIMIT_S:.0f} s", is_final=True)
            yield piece

    def close(self) -> None:
        self._stream.close()
