"""Requests of newer peers: what this version cannot do is refused and not left out in silence.

News (hello, probe, exchange, records, readings) and replies are different: what is unknown in them is ignored.
"""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from exo_mesh import __version__
from exo_mesh.errors import PeerVersionError

FIRST_OPTIONAL = 1000
"""Fields with this number or a higher one may be left out by peers that do not know them."""


def require_known(request: Message) -> None:
    """Raises PeerVersionError if a request has a field, also in a nested message, that this version does not know and
    that it may not leave out."""
    unknown = UnknownFieldSet(request)
    for number in (unknown[index].field_number for index in range(len(unknown))):
        if number < FIRST_OPTIONAL:
            raise PeerVersionError(
                f"exo-mesh {__version__} does not know field {number} of {request.DESCRIPTOR.name}; a peer of a newer "
                "version has asked"
            )
    for field, value in request.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in (value,) if isinstance(value, Message) else value:
            require_known(part)
