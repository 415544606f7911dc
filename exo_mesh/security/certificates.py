"""Creates X.509 certificates: the mesh's authority, which every peer derives itself, and a peer's own certificate."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from exo_mesh.security.credentials import MESH_DNS_NAME, Credentials
from exo_mesh.security.keys import ca_key

AUTHORITY_NAME = "exo-mesh authority"
_AUTHORITY_SERIAL = 1
_AUTHORITY_FROM = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_AUTHORITY_UNTIL = datetime.datetime(2199, 1, 1, tzinfo=datetime.UTC)
"""The authority is always valid: a board without a battery starts in 1970, and a secret is replaced by a new one, not
by expiry."""

VALID = datetime.timedelta(days=398)
"""Validity of a node's certificate. It is created at each start, and renewed when a third of this is left."""
SKEW_DAYS = 30
"""How far the clock of a peer may be behind this node's clock."""


def authority(secret: str) -> x509.Certificate:
    """The certificate that signs every certificate of this mesh: same name, key and validity on all peers."""
    key, name = ca_key(secret), _name(AUTHORITY_NAME)
    return (
        _builder(name, name, key.public_key(), _AUTHORITY_SERIAL, _AUTHORITY_FROM, _AUTHORITY_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def issue(secret: str, peer_name: str, hosts: Iterable[str], now: datetime.datetime) -> Credentials:
    """Creates a key and a certificate for a peer of the mesh with this secret. hosts: its addresses and names."""
    key, root = ec.generate_private_key(ec.SECP256R1()), authority(secret)
    start, end = now - datetime.timedelta(days=SKEW_DAYS), now + VALID
    subject = _name(peer_name)
    certificate = (
        _builder(subject, root.subject, key.public_key(), x509.random_serial_number(), start, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName(_alternative_names(hosts)), critical=False)
        .sign(ca_key(secret), hashes.SHA256())
    )
    pem, secret_form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return Credentials(
        root.public_bytes(pem),
        certificate.public_bytes(pem),
        key.private_bytes(pem, secret_form, serialization.NoEncryption()),
    )


def end_of(own: Credentials) -> datetime.datetime:
    """The time at which this certificate expires."""
    return x509.load_pem_x509_certificate(own.certificate).not_valid_after_utc


def is_due(own: Credentials, now: datetime.datetime) -> bool:
    """Whether this certificate must be renewed: it expires soon, or it starts in the future because the clock was set
    back. On a board without a battery the clock starts in 1970, so the first certificate is due as soon as the clock is
    set."""
    starts = x509.load_pem_x509_certificate(own.certificate).not_valid_before_utc
    return now < starts or end_of(own) - now <= VALID / 3


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    serial: int,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return x509.CertificateBuilder(
        issuer, subject, key, serial, max(start, epoch), end  # some libraries fail on X.509 times before 1970
    )  # fmt: skip


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [x509.DNSName(MESH_DNS_NAME)]
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host.strip("[]").partition("%")[0])))
        except ValueError:
            if host.isascii():
                names.append(x509.DNSName(host))
    return names
