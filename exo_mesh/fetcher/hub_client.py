"""The HTTP client of huggingface_hub, with a bound on what a hub may answer: its library reads answers as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory

from exo_mesh.clock import monotonic
from exo_mesh.errors import FetchError

FILE = "exo_mesh.file"
"""Extension of requests whose answers are read piece by piece, as much as was asked for."""

MAX_ANSWER_BYTES = 16 * 2**20
"""Of any other answer. A listing of 40,000 files has so many; the largest repositories have some thousands."""


ANSWER_LIMIT_S = 30.0
"""For one such answer, however slowly it comes."""


def use_bounded_client() -> None:
    """For all requests of this process. Each thread's first use of the hub makes its client by this."""
    set_client_factory(lambda: bounded(default_client_factory()))


def bounded(client: httpx2.Client) -> httpx2.Client:
    """The same client. Its requests raise FetchError for answers that are compressed or have no end."""
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
        raise FetchError("the hub compresses what it was asked for as it is", is_final=True)
    if isinstance(response.stream, httpx2.SyncByteStream):
        response.stream = _Bounded(response.stream)


class _Bounded(httpx2.SyncByteStream):
    """The same bytes, up to MAX_ANSWER_BYTES and for ANSWER_LIMIT_S. Raises FetchError beyond."""

    def __init__(self, stream: httpx2.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        left, end = MAX_ANSWER_BYTES, monotonic() + ANSWER_LIMIT_S
        for piece in self._stream:
            left -= len(piece)
            if left < 0:
                raise FetchError(f"the hub answers with more than {MAX_ANSWER_BYTES} bytes", is_final=True)
            if monotonic() > end:
                raise FetchError(f"an answer of the hub takes more than {ANSWER_LIMIT_S:.0f} s", is_final=True)
            yield piece

    def close(self) -> None:
        self._stream.close()
