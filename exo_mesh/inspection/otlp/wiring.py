"""Makes the exporter that the settings ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from urllib.parse import urlsplit

from exo_mesh.domain.device import PeerInfo
from exo_mesh.inspection.otlp.encoding import JSON, PROTOBUF, Origin, PeerName, has_messages
from exo_mesh.inspection.otlp.exporter import CollectorTarget, TraceExporter
from exo_mesh.membership.service import Membership
from exo_mesh.settings.config import Settings
from exo_mesh.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)


def exporter_of(settings: Settings, membership: Membership, metrics: Metrics) -> TraceExporter | None:
    """None without --otlp-endpoint."""
    if not settings.otlp_endpoint:
        return None
    protocol = settings.otlp_protocol
    if protocol == PROTOBUF and not has_messages():
        _log.warning(
            "traces are sent as http/json: http/protobuf needs opentelemetry-proto (pip install 'exo-mesh[otel]')"
        )
        protocol = JSON
    target = CollectorTarget(settings.otlp_endpoint, settings.otlp_headers, protocol, settings.otlp_certificate)
    _log.info("traces are sent to %s by %s", target.shown, protocol)
    return TraceExporter(
        target,
        _origin(settings, membership),
        lambda outcome, number: metrics.exported_spans.labels(outcome).inc(number),
    )


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
