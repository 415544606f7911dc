"""Those who do not have the secret of a mesh, and what they can get hold of."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from exo_mesh.security.certificates import issue
from exo_mesh.security.credentials import MESH_DNS_NAME, Credentials
from exo_mesh.security.secret import new_secret

NOW = datetime.datetime.now(datetime.UTC)
DEADLINE_S = 5.0


def of_another_mesh(authority: bytes) -> Credentials:
    """A good certificate of another mesh. It trusts the mesh it calls: an attacker would not check either."""
    other = issue(new_secret(), "stranger", ["127.0.0.1"], NOW)
    return Credentials(authority, other.certificate, other.private_key)


def self_signed(authority: bytes) -> Credentials:
    """A certificate that the stranger signed alone, with the names that those of a mesh have."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stranger")])
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "exo-mesh authority")])
    day = datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), 7, NOW - day, NOW + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(MESH_DNS_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Credentials(authority, certificate.public_bytes(pem), private)


def channels(target: str, authority: bytes) -> Mapping[str, grpc.aio.Channel]:
    """Every way to knock at a closed mesh without its secret."""
    named = [("grpc.ssl_target_name_override", MESH_DNS_NAME)]

    def with_certificate(own: Credentials) -> grpc.aio.Channel:
        tls = grpc.ssl_channel_credentials(own.authority, own.private_key, own.certificate)
        return grpc.aio.secure_channel(target, tls, options=named)

    return {
        "plaintext": grpc.aio.insecure_channel(target),
        "no certificate": grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(authority), options=named),
        "self-signed": with_certificate(self_signed(authority)),
        "another mesh": with_certificate(of_another_mesh(authority)),
    }


async def refused(channel: grpc.aio.Channel, method: str, *, request_stream: bool = False) -> bool:
    """Does a call end before the server has heard any of it? UNAVAILABLE is gRPC's word for "no connection"."""
    kinds = {False: channel.unary_stream, True: channel.stream_stream}
    call = kinds[request_stream](method)
    running = call(iter([b""]), timeout=DEADLINE_S) if request_stream else call(b"", timeout=DEADLINE_S)
    try:
        await running.read()
    except grpc.aio.AioRpcError as exc:
        return exc.code() is grpc.StatusCode.UNAVAILABLE
    return False
