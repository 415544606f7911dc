"""Decides which node the command line calls, and which certificate it trusts if that node serves HTTPS."""

from __future__ import annotations

import ipaddress
import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from exo_mesh.base.printable import reason_of
from exo_mesh.security.api_tls import read_pem
from exo_mesh.security.own_nodes import live_nodes, registered_homes
from exo_mesh.settings import values
from exo_mesh.settings.config import ConfigError, Settings, home_of
from exo_mesh.settings.default_paths import DEFAULT_API_URL, own_nodes_dir
from exo_mesh.settings.loading import load_settings


def default_url(home: Path | str | None = None, own_certificate: Path | None = None) -> str:
    """The API address of the node that a command means if it names no address.

    If a node of the home runs, its address; else the one that the environment or the home's config.toml configures.
    Without a home, a node of this user with another home is meant if none of the default home runs: the one at that
    address, else the one that has run for longest.
    """
    settings = _settings_of(home)
    port = (settings.api_port if settings else 0) or urlsplit(DEFAULT_API_URL).port
    certificate = own_certificate or (settings.tls_cert if settings else None)
    configured = f"{'https' if certificate else 'http'}://127.0.0.1:{port}"
    first, *others = homes_of(home)
    running = live_nodes(first) or [node for other in others for node in live_nodes(other)]
    return min(running, key=lambda node: node.port != port).url if running else configured


def homes_of(home: Path | str | None) -> list[Path]:
    """The homes of the nodes that a command may mean: the named home, or else the default home and the homes of this
    user's other running nodes."""
    return [values.path(str(home))] if home else [home_of(os.environ), *registered_homes(own_nodes_dir())]


def certificate_of(home: Path | str | None) -> Path | None:
    """The TLS certificate that the environment or the home's config.toml configures; None if neither does. home: None
    means the default home."""
    settings = _settings_of(home)
    return settings.tls_cert if settings else None


def _settings_of(home: Path | str | None) -> Settings | None:
    """The settings of a node with this home; None if they cannot be used."""
    try:
        return load_settings({"home": [str(home)]} if home else {}, os.environ).settings
    except ConfigError:
        return None


def trust(host: str, own_certificate: Path | None) -> ssl.SSLContext:
    """The TLS context for HTTPS calls to `host`. If `host` is this machine and own_certificate is given, only that
    certificate is accepted; else one signed by an authority of the system or of EXO_MESH_API_CA. Raises ConfigError."""
    if own_certificate is not None and is_this_machine(host):
        try:
            return _pinned_context(own_certificate)
        except ValueError as exc:
            raise ConfigError(f"--tls-cert: {exc}", param="tls_cert") from exc
    context = ssl.create_default_context()
    if file := os.environ.get("EXO_MESH_API_CA"):
        try:
            read_pem(Path(file))
            context.load_verify_locations(file)
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"EXO_MESH_API_CA={file}: cannot be read as a certificate in PEM form: {reason_of(exc)}"
            ) from exc
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def is_this_machine(host: str) -> bool:
    """Whether a host is an address, or the name, of the loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tls_failure(url: str, reason: ssl.SSLError) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {url} is not trusted ({reason.verify_message}); "
            "set EXO_MESH_API_CA to a PEM file with that certificate or with its authority's"
        )
    return f"the TLS handshake with {url} failed ({reason.reason or reason}); does it serve HTTPS?"


def _pinned_context(certificate: Path) -> ssl.SSLContext:
    """A client context that trusts only the first certificate in the file, under any host name. Raises ValueError.

    Only the server with the matching private key can use that certificate, so a client on the same machine may connect
    to 127.0.0.1. The certificates after the first belong to authorities, which also sign for other servers.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        first, end, _ = read_pem(certificate).decode("ascii", "replace").partition("-----END CERTIFICATE-----")
        context.load_verify_locations(cadata=first[first.index("-----BEGIN CERTIFICATE-----") :] + end)
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        raise ValueError(f"{certificate} holds no readable certificate in PEM form") from exc
    return context
