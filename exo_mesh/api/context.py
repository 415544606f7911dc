"""What the handlers share: the service, the text models, and the options of the API."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.core.defaults import RequestDefaults
from exo_mesh.api.core.texts import TextModels
from exo_mesh.api.web.languages import PageLanguages
from exo_mesh.models.hub_token import HubToken
from exo_mesh.node.service import MeshService
from exo_mesh.security.invitations import Invitations
from exo_mesh.settings.config import default_settings
from exo_mesh.settings.effective import EffectiveSettings, LoneSettings, SettingsDesk
from exo_mesh.tasks import Watchdog
from exo_mesh.telemetry.families import Counters
from exo_mesh.telemetry.node_logs import LogDesk, LoneLogs

REQUEST_ID = web.RequestKey("request_id", str)
"""What the reply's x-request-id header says."""


OUTPUT_BOUND = web.RequestKey("output_bound", int)
"""What the reply's x-exo-mesh-max-tokens header says: the most tokens of the answer, if the client did not ask for just
that many."""


def _lone_settings() -> LoneSettings:
    return LoneSettings(EffectiveSettings(default_settings()))


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """registry: the metrics that /metrics shows. responses: counts answers, by method, route and status. keep_alive_s:
    a waiting stream gets a comment this often. head_hold_s: so long a stream waits for the mesh to take the request,
    before its status and headers go out. stall_limit_s: a client that reads nothing of its stream for so long loses it.
    body_silence_s: a client that sends nothing of a body that it has announced for so long gets a 408, as with nginx.
    invitations: into the mesh of this node; by default nobody is invited. progress_s: least time between two events of
    a stream of download progress. progress_comment_s: such a stream with nothing new gets a comment this often.
    headless: no page for browsers. languages: of the page. live_interval_s: time between two events of the live data.
    defaults: what requests may leave open, as the settings have it now; asked for each request. hub_token: for the hub.
    config: the settings in force, for `/config`; config_file: where the node's own may be. logs: of this
    process, for `/v1/logging`.
    """

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    responses: Counters = field(default_factory=lambda: Counters("responses_total", "", ("method", "route", "code")))
    keep_alive_s: float = 2.0
    head_hold_s: float = 10.0
    stall_limit_s: float = 300.0
    max_body_bytes: int = 16 << 20
    body_silence_s: float = 60.0
    access: AccessPolicy = field(default_factory=AccessPolicy)
    invitations: Invitations = field(default_factory=Invitations)
    progress_s: float = 0.5
    progress_comment_s: float = 15.0
    defaults: Callable[[], RequestDefaults] = RequestDefaults
    logs: LogDesk = field(default_factory=LoneLogs)
    config: SettingsDesk = field(default_factory=_lone_settings)
    config_file: str = ""
    hub_token: HubToken | None = None
    headless: bool = False
    languages: PageLanguages = field(default_factory=PageLanguages)
    live_interval_s: float = 2.0


@dataclass(frozen=True, slots=True)
class ApiContext:
    """now: Unix time, for what OpenAI calls `created`. watchdog: ends waits that have become too long."""

    service: MeshService
    texts: TextModels
    options: ApiOptions
    watchdog: Watchdog
    now: Callable[[], float] = time.time
    started_at: int = 0
