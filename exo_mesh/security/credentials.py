"""What one end of a connection needs to prove that it belongs to the mesh, and to check the other end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

MESH_DNS_NAME = "mesh.exo-mesh"
"""In every certificate. Connections check this name and not the address: addresses of peers come and go."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """PEM texts. The private key lives in memory only: it is on no disk, in no argument and in no variable."""

    authority: bytes
    certificate: bytes
    private_key: bytes = field(repr=False)

    @property
    def current(self) -> Credentials:
        """These: they are a source that never changes."""
        return self


class CredentialSource(Protocol):
    """What a connection that begins now is to use. Connections that are open keep what they began with."""

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
        """From now on these are used."""
        self._current = new
