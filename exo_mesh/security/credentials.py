"""What one end of a connection needs to prove that it belongs to the mesh, and to check the other end."""

from __future__ import annotations

from dataclasses import dataclass, field

MESH_DNS_NAME = "mesh.exo-mesh"
"""In every certificate. Connections check this name and not the address: addresses of peers come and go."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """PEM texts. The private key lives in memory only: it is on no disk, in no argument and in no variable."""

    authority: bytes
    certificate: bytes
    private_key: bytes = field(repr=False)
