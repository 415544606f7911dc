"""Refuses requests of newer peers that need something this version does not know, instead of silently ignoring it.

News (hello, probe, exchange, records, telemetry) and replies are different: unknown fields in them are ignored.
"""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from exo_mesh import __version__
from exo_mesh.errors import PeerVersionError

FIRST_OPTIONAL = 1000
"""Fields with this number or a higher one may be ignored by peers that do not know them."""


def require_known(request: Message) -> None:
    """Raises PeerVersionError if a request, or a message nested in it, has a field that this version does not know and
    must not ignore."""
    unknown = UnknownFieldSet(request)
    for number in (unknown[index].field_number for index in range(len(unknown))):
        if number < FIRST_OPTIONAL:
            raise PeerVersionError(
                f"exo-mesh {__version__} does not know field {number} of {request.DESCRIPTOR.name}, which a peer of a "
                "newer version sent; install one version on all peers"
            )
    for field, value in request.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in (value,) if isinstance(value, Message) else value:
            require_known(part)
