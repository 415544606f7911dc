"""Converts API keys, as salted hashes, to protobuf and back."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from exo_mesh.errors import PeerVersionError
from exo_mesh.security.key_table import MAX_KEYS, MAX_REVOKED, ApiKey, Role
from exo_mesh.wire.message_codec import Codec
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.unknown_fields import require_known

KEY = Codec(ApiKey, pb.SharedKey, besides=["role"])


def keys_to_proto(keys: Iterable[ApiKey]) -> list[pb.SharedKey]:
    return [KEY.write(key, role="" if key.revoked else key.role) for key in keys]


def keys_from_proto(messages: Iterable[pb.SharedKey]) -> list[ApiKey]:
    """The valid entries. Entries that this version does not understand, and entries beyond a full table, are left
    out."""
    found = (_from_proto(message) for message in islice(messages, MAX_KEYS + MAX_REVOKED))
    return [key for key in found if key is not None and key.is_well_formed]


def _from_proto(message: pb.SharedKey) -> ApiKey | None:
    role = Role.USE if message.revoked else message.role
    if role not in set(Role):
        return None
    try:
        require_known(message)  # an unknown field may restrict the key
    except PeerVersionError:
        return None
    return KEY.read(message, role=Role(role))
