"""Who may call the HTTP API: keys and their roles, the exemption of this machine, and what web pages may do.

Open as long as neither a secret nor a key is set. Then reading needs a key too, except for OPEN_PATHS, which
load balancers and monitoring ask.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from exo_mesh.api.errors import plain_error
from exo_mesh.security.api_keys import KeyFile, Role

OPEN_PATHS = frozenset({"/", "/version", "/health", "/healthcheck", "/healthz", "/readyz", "/metrics"})

USE_ROUTES = frozenset(
    {
        ("POST", "/v1/chat/completions"),
        ("POST", "/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/completions"),
        ("POST", "/v1/cancel/{id}"),
    }
)
"""Calls with an effect that the role "use" is enough for. Every other one that is no GET needs "admin"."""

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_LAN_SUFFIXES = (".localhost", ".local", ".lan", ".home.arpa", ".internal")
"""Names that no public name server answers for (RFC 6761, 6762, 8375; .internal: ICANN 2024; .lan: in wide use)."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request. key_id is empty for those who need no key."""

    key_id: str
    role: Role


CALLER = web.RequestKey("caller", Caller)
ANYBODY = Caller("", Role.ADMIN)
STRANGER = Caller("", Role.USE)
"""Who has no key where one is needed; they get to the open paths only."""


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """keys: None if there can be none. needs_key: callers need one even if none is configured yet. cors_origins: web
    origins that may call from a browser, in lower case; "*" is all of them."""

    keys: KeyFile | None = None
    needs_key: bool = False
    loopback_exemption: bool = True
    cors_origins: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_open(self) -> bool:
        """May anybody who reaches the port call anything?"""
        return not self.needs_key and not (self.keys and self.keys.configured)

    def allows_origin(self, origin: str) -> bool:
        return "*" in self.cors_origins or origin.lower() in self.cors_origins


def needed_role(method: str, path: str) -> Role | None:
    """The role that a route needs, by its canonical path; None for what everybody may call."""
    if method in _READING:
        return None if path in OPEN_PATHS else Role.USE
    return Role.USE if (method, path) in USE_ROUTES else Role.ADMIN


def guard(policy: AccessPolicy) -> Middleware:
    """The middleware that lets requests in. It looks at headers only: a refused body is never read."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if reply := _preflight(request, policy) or _cross_site(request, policy):
            return reply
        resource = request.match_info.route.resource
        role = needed_role(request.method, resource.canonical if resource else request.path)
        caller = ANYBODY if policy.is_open or is_exempt(request, policy) else _keyholder(request, policy)
        if caller is None and role is not None:
            return _unknown_caller()
        if caller is not None and role is not None and not caller.role.covers(role):
            message = f"{request.method} {request.path} needs a key with the role {role}; this one has {caller.role}"
            return plain_error("insufficient_permissions", message)
        request[CALLER] = caller or STRANGER
        return await handler(request)

    return check


def send_cors_headers(policy: AccessPolicy, request: web.Request, response: web.StreamResponse) -> None:
    """Let pages of the origins that were allowed read the reply."""
    origin = request.headers.get(hdrs.ORIGIN)
    if policy.cors_origins:
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
    if origin and policy.allows_origin(origin):
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "x-request-id, retry-after"


def is_exempt(request: web.Request, policy: AccessPolicy) -> bool:
    """Does the request come from this machine? By the address of the connection; what headers say does not count.

    A page in a browser also comes from this machine. If it has rebound its own name to 127.0.0.1, that name, in Host,
    gives it away. If its origin is allowed only because all are, it needs a key.
    """
    if not policy.loopback_exemption or not _is_loopback(request.remote):
        return False
    origin = request.headers.get(hdrs.ORIGIN, "").lower()
    own_page = not origin or origin in policy.cors_origins or _netloc(origin) == request.host.lower()
    return own_page and _is_local_name(request.host, policy)


def _keyholder(request: web.Request, policy: AccessPolicy) -> Caller | None:
    scheme, _, text = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() != "bearer":
        text = request.headers.get("x-api-key", "")
    key = policy.keys.check(text.strip()) if policy.keys else None
    return Caller(key.id, key.role) if key else None


def _unknown_caller() -> web.Response:
    reply = plain_error(
        "invalid_api_key",
        "this API needs a valid key as `Authorization: Bearer KEY`; `exo-mesh key new` on the node makes one",
    )
    reply.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    return reply


def _preflight(request: web.Request, policy: AccessPolicy) -> web.Response | None:
    """The answer to a browser that asks whether a page may call; None for any other request."""
    origin = request.headers.get(hdrs.ORIGIN)
    asks = request.method == "OPTIONS" and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
    if not asks or not origin or not policy.allows_origin(origin):
        return None
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    return web.Response(
        status=204,
        headers={
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, DELETE",
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: wanted,
            hdrs.ACCESS_CONTROL_MAX_AGE: "600",
        },
    )


def _cross_site(request: web.Request, policy: AccessPolicy) -> web.Response | None:
    """A refusal, if a page of another origin tries to change something. Programs send neither header."""
    if request.method in _READING:
        return None
    origin, site = request.headers.get(hdrs.ORIGIN), request.headers.get("Sec-Fetch-Site", "none")
    if origin is None:
        refused = site not in ("none", "same-origin")
    elif policy.allows_origin(origin):
        refused = False
    else:
        rebound = policy.is_open and not _is_local_name(request.host, policy)
        refused = _netloc(origin) != request.host.lower() or rebound
    if not refused:
        return None
    message = f"web pages of {origin or 'other sites'} may not call this API; --cors-origin allows an origin"
    return plain_error("cross_site_refused", message)


def _is_loopback(address: str | None) -> bool:
    try:
        parsed = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _is_local_name(host: str, policy: AccessPolicy) -> bool:
    """Is a Host header an address, a name that only this network knows, or a name that the operator has allowed?"""
    name = _hostname(f"//{host}").rstrip(".")
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        known = {_hostname(origin) for origin in policy.cors_origins}
        return bool(name) and ("." not in name or name.endswith(_LAN_SUFFIXES) or name in known)
    return True


def _netloc(origin: str) -> str:
    """host:port of an origin, in lower case; "" if it is none. Callers write what they like into a header."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
