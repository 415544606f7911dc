"""Builds the exporter of traces from the settings."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from exo_mesh.base.printable import quoted
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.domain.device import PeerInfo
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.node.inspection.otlp.encoding import JSON, PROTOBUF, Origin, PeerName
from exo_mesh.node.inspection.otlp.exporter import CollectorTarget, TraceExporter
from exo_mesh.settings.config import ConfigError, Settings
from exo_mesh.wire.otlp_messages import are_installed

_log = logging.getLogger(__name__)


def exporter_of(settings: Settings, membership: Membership, metrics: Metrics) -> TraceExporter | None:
    """Builds the exporter; None without --otlp-endpoint. Raises ConfigError for a bad header or certificate."""
    if not settings.otlp_endpoint:
        return None
    protocol = settings.otlp_protocol
    if protocol == PROTOBUF and not are_installed():
        _log.warning("sending traces as http/json, because http/protobuf needs a package: pip install 'exo-mesh[otel]'")
        protocol = JSON
    headers, tls = checked(settings.otlp_headers), authority(settings.otlp_certificate)
    target = CollectorTarget(settings.otlp_endpoint, headers, protocol, tls)
    _log.info("sending traces to %s as %s", target.shown, protocol)
    return TraceExporter(
        target,
        _origin(settings, membership),
        lambda outcome, number: metrics.exported_spans.labels(outcome).inc(number),
    )


def checked(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the headers. Raises ConfigError if one is not valid in HTTP."""
    for name, value in headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise ConfigError(f"--otlp-header: {quoted(name, 64)} is not a valid header name", param="otlp_header")
        if not re.fullmatch(r"[\x20-\x7e]*", value):
            raise ConfigError(f"--otlp-header: the value of {name} must be printable ASCII", param="otlp_header")
    return headers


def authority(path: Path | None) -> ssl.SSLContext | None:
    """A TLS context that trusts the CA in a file; None without a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(path))
    except OSError as exc:  # includes SSLError
        raise ConfigError(f"--otlp-certificate {path}: {exc.strerror or exc}", param="otlp_certificate") from exc


def _origin(settings: Settings, membership: Membership) -> Callable[[], Origin]:
    def of_now() -> Origin:
        own = membership.own
        url = urlsplit(own.api_url)
        address = (url.hostname, url.port) if url.hostname and url.port else None
        peers = tuple(_name(peer) for peer in membership.view.peers())
        return Origin(_name(own), peers, settings.otlp_service, settings.otlp_attributes, address)

    return of_now


def _name(peer: PeerInfo) -> PeerName:
    return PeerName(peer.id, peer.name, peer.version)
