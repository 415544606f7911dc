"""Derives keys from the mesh's secret. Each purpose has its own key, and no key reveals the secret."""

from __future__ import annotations

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SALT = b"exo-mesh"
CA_INFO = b"exo-mesh v1: certificate authority, P-256 private key"
ANNOUNCEMENT_INFO = b"exo-mesh v1: announcements, HMAC-SHA256"
PROBE_INFO = b"exo-mesh v1: probe datagrams, ChaCha20-Poly1305"
PREFIX_DISK_INFO = b"exo-mesh v1: files with KV, AES-256-GCM"
SESSION_INFO = b"exo-mesh v1: sessions of the page, HMAC-SHA256"

P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""SEC 2, 2.4.2 (secp256r1)."""

_EXTRA_BYTES = 16
"""128 bits more than the order, so that the remainder is not biased: FIPS 186-5, A.2.1."""


def derive(secret: str, info: bytes, num_bytes: int) -> bytes:
    """HKDF-SHA256 (RFC 5869) of the secret for one purpose."""
    return HKDF(hashes.SHA256(), num_bytes, SALT, info).derive(secret.encode("ascii"))


def ca_key(secret: str) -> ec.EllipticCurvePrivateKey:
    """The private key of the mesh's certificate authority, the same on every peer."""
    number = int.from_bytes(derive(secret, CA_INFO, 32 + _EXTRA_BYTES), "big")
    return ec.derive_private_key(number % (P256_ORDER - 1) + 1, ec.SECP256R1())


def announcement_key(secret: str) -> bytes:
    """The key that signs announcements."""
    return derive(secret, ANNOUNCEMENT_INFO, 32)


def probe_key(secret: str) -> bytes:
    """The key from which each start of a node derives its own for probe datagrams."""
    return derive(secret, PROBE_INFO, 32)


def session_key(secret: str) -> bytes:
    """The key that signs sessions of the page."""
    return derive(secret, SESSION_INFO, 32)


def prefix_disk_key(secret: str) -> bytes:
    """The key that seals files with KV."""
    return derive(secret, PREFIX_DISK_INFO, 32)
