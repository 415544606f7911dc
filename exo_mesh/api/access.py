"""Who may call the HTTP API: keys and their roles, the local token, and what web pages may do.

An open mesh, which has neither a secret nor a key, lets everybody read and chat; changing it takes the local token, or
`--open-admin`. On a closed mesh every call takes a key or the local token, except for the open paths, which load
balancers and monitoring ask. The address of a caller gives no rights.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from exo_mesh.api.errors import plain_error
from exo_mesh.api.routes import RouteRoles
from exo_mesh.security.api_keys import KeyFile, Role
from exo_mesh.security.local_token import is_token

HEALTH_PATHS = frozenset({"/health", "/healthcheck", "/healthz", "/readyz"})
METRICS_PATHS = frozenset({"/metrics"})
"""Open paths that `--open-paths` can close."""

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_LAN_SUFFIXES = (".localhost", ".local", ".lan", ".home.arpa", ".internal")
"""Names that no public name server answers for (RFC 6761, 6762, 8375; .internal: ICANN 2024; .lan: in wide use)."""

_CORS_METHODS = "GET, POST, PUT, DELETE"
_CORS_HEADERS = "Authorization, Content-Type, Idempotency-Key, Last-Event-ID"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request. key_id: of the key shown, "local" for the local token, empty without either.

    role: None for strangers on a closed mesh, who may ask the open paths only.
    """

    key_id: str
    role: Role | None

    @property
    def may_download(self) -> bool:
        """Whether a chat of this caller may start a download; loading files that the mesh has is always allowed.

        True for admins and for holders of any key. False for callers that an open mesh lets in without one: they
        could fill the disks of every peer.
        """
        return self.role is Role.ADMIN or (self.role is Role.USE and bool(self.key_id))

    @property
    def limited_to(self) -> str | None:
        """The API key ("": none) whose requests this caller may see and cancel; None: those of everybody."""
        return None if self.role is Role.ADMIN else self.key_id


CALLER = web.RequestKey("caller", Caller)
LOCAL = Caller("local", Role.ADMIN)
"""The holder of the local token. Ids of keys have eight digits, so none is called that."""
ANYBODY = Caller("", Role.USE)
"""A caller without a key on an open mesh."""
ANY_ADMIN = Caller("", Role.ADMIN)
"""A caller without a key on an open mesh with `--open-admin`."""
STRANGER = Caller("", None)
"""A caller without a key on a closed mesh."""


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Who may do what. An origin or host of "*" stands for all of them.

    keys: None if there can be none. needs_key: callers need one even if none is configured yet. local_token: "" if
    there is none. open_admin: everybody may change an open mesh. closed_paths: of the open ones, those that need a key
    on a closed mesh all the same.
    cors_origins: web origins that may call from a browser, besides those of localhost; in lower case. member_origins:
    those of the live members now; the page of one member goes on at another when its own node dies.
    allowed_hosts: names of this node in Host headers, besides local ones; in lower case.
    """

    keys: KeyFile | None = None
    needs_key: bool = False
    local_token: str = ""
    open_admin: bool = False
    closed_paths: frozenset[str] = frozenset()
    cors_origins: frozenset[str] = field(default_factory=frozenset)
    member_origins: Callable[[], Set[str]] = frozenset
    allowed_hosts: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_open(self) -> bool:
        """Whether callers without a key may read and chat."""
        return not self.needs_key and not (self.keys and self.keys.configured)

    def allows_origin(self, origin: str) -> bool:
        origin = origin.lower()
        if "*" in self.cors_origins or origin in self.cors_origins or _is_localhost(origin):
            return True
        return origin in self.member_origins()

    def allows_host(self, host: str) -> bool:
        """Whether a Host header is an address, a name that only this network knows, or a name that was allowed."""
        name = _hostname(f"//{host}").rstrip(".")
        if "*" in self.allowed_hosts or name in self.allowed_hosts or is_local_host(name):
            return True
        return bool(name) and name in {_hostname(origin) for origin in self.cors_origins}

    def describe(self) -> str:
        """Who may do what, in one line."""
        if not self.is_open:
            return "closed: every call needs a key, or the local token, which exo-mesh on this machine sends"
        if self.open_admin:
            return "open to all (--open-admin): anybody who reaches it may read, chat and change everything"
        return (
            "open to read and chat for anybody who reaches it; "
            "changes need the local token, which exo-mesh on this machine sends"
        )


def guard(policy: AccessPolicy, roles: RouteRoles) -> Middleware:
    """The middleware that lets requests in. It looks at headers only: a refused body is never read."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        caller = _caller(request, policy)
        resource = request.match_info.route.resource
        path = resource.canonical if resource else request.path
        role = roles.needed(request.method, path)
        if reply := (
            _preflight(request, policy)
            or _misdirected(request, policy, caller)
            or _cross_site(request, role, policy)
            or _not_allowed(request, _closed(role, path, policy), caller)
        ):
            return reply
        request[CALLER] = caller
        return await handler(request)

    return check


def send_cors_headers(policy: AccessPolicy, request: web.Request, response: web.StreamResponse) -> None:
    """Let pages of the origins that were allowed read the reply."""
    origin = request.headers.get(hdrs.ORIGIN)
    response.headers.add(hdrs.VARY, hdrs.ORIGIN)
    if origin and policy.allows_origin(origin):
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = (
            "x-request-id, retry-after, x-exo-mesh-stream-secret, x-trace-id, traceresponse"
        )


def _caller(request: web.Request, policy: AccessPolicy) -> Caller:
    """By the key or token shown, and only by it: an open mesh ignores a text that is neither."""
    scheme, _, text = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() != "bearer":
        text = request.headers.get("x-api-key", "")
    text = text.strip()
    if is_token(text, policy.local_token):
        return LOCAL
    if key := policy.keys.check(text) if policy.keys else None:
        return Caller(key.id, key.role)
    if not policy.is_open:
        return STRANGER
    return ANY_ADMIN if policy.open_admin else ANYBODY


def _closed(role: Role | None, path: str, policy: AccessPolicy) -> Role | None:
    """The role that a call needs where `--open-paths` says less than the table of routes."""
    return Role.USE if role is None and path in policy.closed_paths else role


def _not_allowed(request: web.Request, role: Role | None, caller: Caller) -> web.Response | None:
    """The refusal of a call that this caller may not make. role: what the call needs."""
    if role is Role.ADMIN and request.match_info.http_exception is not None:
        role = Role.USE  # there is no such route, which is said to everybody who may read
    if role is None or (caller.role is not None and caller.role.covers(role)):
        return None
    if caller.role is None:
        return _unknown_caller()
    call = f"{request.method} {request.path}"
    if caller != ANYBODY:
        message = f"{call} needs a key with the role {role}; this one has {caller.role}"
        return plain_error("insufficient_permissions", message)
    message = (
        f"{call} changes an open mesh, which callers without local rights may only read and chat with. "
        "Use exo-mesh on the node's own machine, which sends the token in the file local_token of its home; "
        "or show a key (`exo-mesh key new --role admin` on the node; then all calls need one); "
        "or start the node with --open-admin"
    )
    return plain_error("insufficient_permissions", message)


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
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _CORS_METHODS,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: f"{_CORS_HEADERS}, {wanted}" if wanted else _CORS_HEADERS,
            hdrs.ACCESS_CONTROL_MAX_AGE: "600",
        },
    )


def _misdirected(request: web.Request, policy: AccessPolicy, caller: Caller) -> web.Response | None:
    """A refusal, if the request is for a host that this node is not.

    A web page can make its own name point to this node and then passes for the same origin; that name, in Host, gives
    it away. Such a page has no key, and programs that send no Host are no browsers.
    """
    host = request.headers.get(hdrs.HOST)
    if host is None or caller.key_id or policy.allows_host(host):
        return None
    message = f"this node is not known as {host!r}; --allowed-hosts adds names, and calls with a key may use any"
    return plain_error("misdirected_request", message)


def _cross_site(request: web.Request, role: Role | None, policy: AccessPolicy) -> web.Response | None:
    """A refusal, if a page of another origin tries to change something, or to read more than the open paths.

    It could not read the answer, but reading may cost much, such as asking all peers. Programs send neither header.
    """
    reads = request.method in _READING
    if reads and role is None:
        return None
    origin, site = request.headers.get(hdrs.ORIGIN), request.headers.get("Sec-Fetch-Site", "none")
    if origin is not None:
        refused = not policy.allows_origin(origin) and _netloc(origin) != request.headers.get(hdrs.HOST, "").lower()
    elif reads:
        refused = site == "cross-site" and "*" not in policy.cors_origins
    else:
        refused = site not in ("none", "same-origin")
    if not refused:
        return None
    message = f"web pages of {origin or 'other sites'} may not call this API; --cors-origin allows an origin"
    return plain_error("cross_site_refused", message)


def is_local_host(name: str) -> bool:
    """Whether a host is an address, or a name that only the local network answers for."""
    return bool(name) and (_is_address(name) or "." not in name or name.endswith(_LAN_SUFFIXES))


def _is_localhost(origin: str) -> bool:
    """Whether a web origin is of the browser's own machine."""
    name = _hostname(origin)
    local = name == "localhost" or name.endswith(".localhost") or (_is_address(name) and _is_loopback(name))
    return local and origin.startswith(("http://", "https://"))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


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
