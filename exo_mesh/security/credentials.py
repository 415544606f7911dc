"""The credentials with which one end of a connection proves that it belongs to the mesh and checks the other end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

MESH_DNS_NAME = "mesh.exo-mesh"
"""The DNS name in every certificate. Connections check this name and not the address, because peers' addresses
change."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Certificates and key as PEM texts. The private key exists only in memory, never on disk, in an argument or in a
    variable."""

    authority: bytes
    certificate: bytes
    private_key: bytes = field(repr=False)

    @property
    def current(self) -> Credentials:
        """These credentials: a source that never changes."""
        return self


class CredentialSource(Protocol):
    """Supplies the credentials for new connections. Open connections keep the ones they started with."""

    @property
    def current(self) -> Credentials: ...


class RenewedCredentials:
    """Credentials that are replaced from time to time; may be read from any thread."""

    def __init__(self, first: Credentials) -> None:
        self._current = first

    @property
    def current(self) -> Credentials:
        return self._current

    def replace(self, new: Credentials) -> None:
        """Use these credentials for new connections from now on."""
        self._current = new
