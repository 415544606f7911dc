"""Which server the verbs of the command line trust, where the API of a node speaks HTTPS."""

from __future__ import annotations

import ipaddress
import os
import ssl
from pathlib import Path

from exo_mesh.settings.config import ConfigError, load_settings
from exo_mesh.settings.places import DEFAULT_API_URL


def default_url(home: Path | str | None = None, own_certificate: Path | None = None) -> str:
    """Where a node of this machine answers that has the default port."""
    own = own_certificate or certificate_of(home)
    return DEFAULT_API_URL.replace("http:", "https:") if own else DEFAULT_API_URL


def certificate_of(home: Path | str | None) -> Path | None:
    """The certificate that a node with this home has from the environment and config.toml; None for the usual home."""
    try:
        return load_settings({"home": [str(home)]} if home else {}, os.environ).settings.tls_cert
    except ConfigError:
        return None


def trust(host: str, own_certificate: Path | None) -> ssl.SSLContext:
    """What to trust when `host` is asked over HTTPS: on this machine the certificate of its own node, and nothing else;
    else the authorities of the system and EXO_MESH_API_CA."""
    if own_certificate is not None and _is_this_machine(host):
        try:
            return _pinned_context(own_certificate)
        except ValueError as exc:
            raise ConfigError(f"--tls-cert: {exc}", param="tls_cert") from exc
    context = ssl.create_default_context()
    if file := os.environ.get("EXO_MESH_API_CA"):
        try:
            context.load_verify_locations(file)
        except OSError as exc:
            raise ConfigError(f"EXO_MESH_API_CA={file}: there is no certificate in PEM form in it") from exc
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tls_failure(url: str, reason: ssl.SSLError) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {url} is not trusted ({reason.verify_message}); "
            "set EXO_MESH_API_CA to it, or to that of its authority"
        )
    return f"{url} does not speak TLS as it should ({reason.reason or reason})"


def _pinned_context(certificate: Path) -> ssl.SSLContext:
    """For clients: trusts the first certificate in the file and no other, whatever name the server goes by. Raises
    ValueError.

    Only a server with its private key can use it, so a client on the same machine may use 127.0.0.1. The certificates
    that follow belong to authorities, which sign for anybody.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        first, end, _ = certificate.read_text(encoding="ascii", errors="replace").partition("-----END CERTIFICATE-----")
        context.load_verify_locations(cadata=first[first.index("-----BEGIN CERTIFICATE-----") :] + end)
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        raise ValueError(f"{certificate} has no certificate that can be read") from exc
    return context
