"""What a file server and its clients say to each other, besides plain HTTP/1.1.

    GET /models/<quoted name>           ModelListing as JSON
    GET /models/<quoted name>/<file>    bytes of a file; `Range: bytes=A-B` for some of them

Every answer about a model has its card digest as ETag; with `If-Match` another version of the model is refused (412). A
range of a file that is not whole is answered up to the end of what is there (206 with a shorter Content-Range), and
with 416 if its first byte is not there.
"""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from exo_mesh.domain.spans import Span

WAIT_HEADER = "Exo-Wait-S"
"""In a request: how many seconds to wait until the first byte of the range is there."""

MAX_WAIT_S = 30.0

PRESENT_HEADER = "Exo-Present"
"""In a 416: how many bytes of the model's files are there. A client that waits sees by it whether more arrives."""

MAX_LISTING_BYTES = 32 * 2**20


class ListedFile(msgspec.Struct, frozen=True):
    """size: of the whole file. sha256: likewise, "" if it is not known. present: spans that can be read now."""

    size: int
    sha256: str = ""
    present: tuple[Span, ...] = ()


class ModelListing(msgspec.Struct, frozen=True):
    """repo, revision: a hub id and a commit, "" if the model is only in the mesh. digest: of the model's card.

    made: files that this or another peer has made and that are at no hub, see exo_mesh/weights/fetched.py.
    """

    repo: str
    revision: str
    digest: str
    files: dict[str, ListedFile]
    made: tuple[str, ...] = ()


def path_of(model: str, file: str = "") -> str:
    """The path of a listing, or of a file."""
    listing = f"/models/{quote(model, safe='')}"
    return f"{listing}/{quote(file, safe='')}" if file else listing
