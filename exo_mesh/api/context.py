"""The objects that all handlers share: the services, the text models, and the options of the API."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.web.languages import PageLanguages
from exo_mesh.api.webtools.options import WebToolOptions
from exo_mesh.base.tasks import Watchdog
from exo_mesh.base.telemetry.families import Counters
from exo_mesh.base.telemetry.node_logs import LogDesk, LoneLogs
from exo_mesh.models.hub_token import HubToken
from exo_mesh.node.service import Services
from exo_mesh.security.invitations import Invitations
from exo_mesh.settings.config import Settings, default_settings
from exo_mesh.settings.effective import EffectiveSettings, LoneSettings, SettingsDesk

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from exo_mesh.api.core.image_trail import ImageTrail
    from exo_mesh.api.core.texts import TextModels


T = TypeVar("T")

REQUEST_ID = web.RequestKey("request_id", str)
"""The x-request-id header of the reply."""

OUTPUT_BOUND = web.RequestKey("output_bound", int)
"""The x-exo-mesh-max-tokens header of the reply: the most tokens of the answer. Set only if this differs from the
number that the client asked for."""

SECRET_HEADER = "x-exo-mesh-stream-secret"

STREAM_SECRET = web.RequestKey("stream_secret", str)
"""The header of the reply; only for requests without a key. With this secret of a running answer a client can read and
stop the answer at any peer."""


MAX_TOKENS = 4096


class RequestDefaults(msgspec.Struct, frozen=True):
    """Default values for requests. temperature: overrides the model's recommendation; None means no default.
    system_prompt: for conversations without one. max_tokens: for answers in conversations, if there is room for so
    many. model: "" means the only model of the mesh. keep_agent_lines: leave the changing lines of agents first; see
    exo_mesh.api.core.agent_lines. control_tokens_in_text: leave control tokens in texts; see
    exo_mesh.text.control_text. trace_sample: the share of requests without a traceparent header that is traced."""

    temperature: float | None = None
    system_prompt: str = ""
    max_tokens: int = MAX_TOKENS
    model: str = ""
    keep_agent_lines: bool = False
    control_tokens_in_text: bool = False
    trace_sample: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> RequestDefaults:
        """The defaults that these settings define."""
        return cls(
            settings.default_temp,
            settings.system_prompt,
            settings.max_generate_tokens,
            settings.default_model,
            settings.keep_agent_lines,
            settings.control_tokens_in_text,
            settings.trace_sample,
        )


def _lone_settings() -> LoneSettings:
    return LoneSettings(EffectiveSettings(default_settings()))


class ApiOptions(msgspec.Struct, frozen=True):
    """The options of the API.

    registry: returns the metrics that /metrics shows; None: there are none. responses: counts answers by method, route
    and status. keep_alive_s: interval of the comments in a waiting stream. head_hold_s: how long a stream waits for the
    mesh to accept the request before it sends status and headers. stall_limit_s: a client that reads nothing of its
    stream for this long is disconnected. body_silence_s: a client that sends nothing of an announced body for this long
    gets a 408, as with nginx. invitations: invitations into this node's mesh; none by default. progress_s: least time
    between two events of a stream of download progress. progress_comment_s: interval of the comments in such a stream
    without news. headless: serve no web page. languages: the languages of the page. live_interval_s: time between two
    events of the live data. defaults: returns the current defaults for fields that a request leaves out; called for
    each request. hub_token: the token for the hub. config: the current settings, for `/config`; config_file: the path
    of this node's config.toml, which need not exist. logs: the log of this process, for `/v1/logging`. ollama_port: the
    port at which clients of Ollama call; None if there is none. web_tools: the tools that fetch pages from the web.
    image_trail: follows images, if somebody looks for a mistake. warm_after_s: the handlers of
    chats are imported with the first call of a client, whatever it asks, and at latest after this time.
    """

    registry: Callable[[], CollectorRegistry] | None = None
    responses: Counters = msgspec.field(
        default_factory=lambda: Counters("responses_total", "", ("method", "route", "code"))
    )
    keep_alive_s: float = 2.0
    head_hold_s: float = 10.0
    stall_limit_s: float = 300.0
    max_body_bytes: int = 16 << 20
    body_silence_s: float = 60.0
    access: AccessPolicy = msgspec.field(default_factory=AccessPolicy)
    invitations: Invitations = msgspec.field(default_factory=Invitations)
    progress_s: float = 0.5
    progress_comment_s: float = 15.0
    defaults: Callable[[], RequestDefaults] = RequestDefaults
    logs: LogDesk = msgspec.field(default_factory=LoneLogs)
    config: SettingsDesk = msgspec.field(default_factory=_lone_settings)
    config_file: str = ""
    hub_token: HubToken | None = None
    headless: bool = False
    languages: PageLanguages = msgspec.field(default_factory=PageLanguages)
    live_interval_s: float = 2.0
    ollama_port: int | None = None
    web_tools: WebToolOptions = msgspec.field(default_factory=WebToolOptions)
    image_trail: ImageTrail | None = None
    warm_after_s: float = 10.0


class ApiContext:
    """The shared objects of one application. now: Unix time, for the field `created` of OpenAI's replies. watchdog:
    ends waits that take too long. texts: closed with the context; they are made at their first use if none are
    given."""

    def __init__(
        self,
        services: Services,
        options: ApiOptions,
        watchdog: Watchdog,
        now: Callable[[], float] = time.time,
        texts: TextModels | None = None,
    ) -> None:
        self.services = services
        self.options = options
        self.watchdog = watchdog
        self.now = now
        self.started_at = int(now())
        self._texts = texts
        self._shared: dict[Any, Any] = {}

    @property
    def texts(self) -> TextModels:
        """The text models that all dialects share."""
        if self._texts is None:
            from exo_mesh.api.core.templates import TemplateRenderer  # handlers that use texts have imported both
            from exo_mesh.api.core.texts import TextModels

            self._texts = TextModels(TemplateRenderer(), self.options.image_trail)
        return self._texts

    def shared(self, kind: Callable[[ApiContext], T]) -> T:
        """The object of this class that several groups of handlers share; it is built at the first call."""
        if kind not in self._shared:
            self._shared[kind] = kind(self)
        made: T = self._shared[kind]
        return made

    async def close(self) -> None:
        """End the threads and processes of the text models."""
        if self._texts is not None:
            await self._texts.close()


def new_secret(request: web.Request, secret: str = "") -> str:
    """Make a secret, unless one is given, and add it to the reply's headers."""
    request[STREAM_SECRET] = secret or secrets.token_urlsafe(24)
    return request[STREAM_SECRET]
