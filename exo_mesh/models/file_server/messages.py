"""The protocol between a file server and its clients, on top of plain HTTP/1.1.

    GET /models/<quoted name>           exo_mesh.models.file_server.listing.Listing as JSON
    GET /models/<quoted name>/<file>    bytes of a file; `Range: bytes=A-B` for some of them

Every answer about a model has its card digest as ETag; with `If-Match` another version of the model is refused (412). A
range of a file that is not whole is answered up to the end of what is there (206 with a shorter Content-Range), and
with 416 if its first byte is not there.

The listing says which files can be copied, and no more. A node that plans a fetch asks with the RPC DescribeFiles which
bytes of the checkpoint files a peer has.
"""

from __future__ import annotations

from urllib.parse import quote

WAIT_HEADER = "Exo-Wait-S"
"""Request header: how many seconds to wait until the first byte of the range is present."""

MAX_WAIT_S = 30.0

PRESENT_HEADER = "Exo-Present"
"""Header of a 416 answer: how many bytes of the model's files are present. It shows a waiting client the progress."""

MAX_LISTING_BYTES = 32 * 2**20


def path_of(model: str, file: str = "") -> str:
    """Returns the path of a listing, or of a file."""
    listing = f"/models/{quote(model, safe='')}"
    return f"{listing}/{quote(file, safe='')}" if file else listing
