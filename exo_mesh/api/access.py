"""Decides who may call the HTTP API: keys and their roles, the local token, sessions, and the rights of web pages.

An open mesh has neither a secret nor a key. Everybody may read and chat there; changes need the local token or
`--open-admin`. On a closed mesh every call needs a key or the local token, except for the open paths, which load
balancers and monitoring use. The address of a caller gives no rights.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Set
from urllib.parse import urlsplit

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from exo_mesh.api.errors import plain_error, quoted
from exo_mesh.api.routes import RouteRoles
from exo_mesh.security.api_keys import KeyFile, Role
from exo_mesh.security.local_token import is_token
from exo_mesh.security.sessions import PageSessions, number_of
from exo_mesh.settings import values

HEALTH_PATHS = frozenset({"/health", "/healthcheck", "/healthz", "/readyz"})
METRICS_PATHS = frozenset({"/metrics"})
"""Open paths that `--open-paths` can close."""

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_LAN_SUFFIXES = (".localhost", ".local", ".lan", ".home.arpa", ".internal")
"""Suffixes that no public name server resolves (RFC 6761, 6762, 8375; .internal: ICANN 2024; .lan: widely used)."""

_MADE_UP_HOST = re.compile(r"(?<=^vscode-webview://).*")
"""Matches the host in the origin of an editor's panel, which the editor makes up for each panel."""

_CORS_METHODS = "GET, POST, PUT, DELETE"
_CORS_HEADERS = "Authorization, Content-Type, Idempotency-Key, Last-Event-ID"


class Caller(msgspec.Struct, frozen=True):
    """The caller of a request. key_id: the id of the caller's key or session, "local" for the local token, "" without
    either.

    role: None for callers without a key on a closed mesh, who may call only the open paths.
    """

    key_id: str
    role: Role | None

    @property
    def may_download(self) -> bool:
        """Whether a chat of this caller may start a download; loading files that the mesh has is always allowed.

        True for admins and for holders of any key. False for callers without a key on an open mesh, who could fill the
        disks of all peers.
        """
        return self.role is Role.ADMIN or (self.role is Role.USE and bool(self.key_id))

    @property
    def may_browse(self) -> bool:
        """Whether this caller may use the web tools. Their calls come from this machine, so a stranger on an open mesh
        could hide behind it."""
        return self.may_download

    @property
    def limited_to(self) -> str | None:
        """The id of the API key whose requests this caller may see and cancel; "" means requests without a key, None
        means all requests."""
        return None if self.role is Role.ADMIN else self.key_id


CALLER = web.RequestKey("caller", Caller)
LOCAL = Caller("local", Role.ADMIN)
"""The holder of the local token. Ids of keys have eight digits, so no key has the id "local"."""
ANYBODY = Caller("", Role.USE)
"""A caller without a key on an open mesh."""
ANY_ADMIN = Caller("", Role.ADMIN)
"""A caller without a key on an open mesh with `--open-admin`."""
STRANGER = Caller("", None)
"""A caller without a key on a closed mesh."""


class AccessPolicy(msgspec.Struct, frozen=True):
    """The access rules of one node. The origin or host "*" means all of them.

    keys: None if the node keeps no keys. sessions: None in a mesh without a secret. needs_key: callers need a key even
    if none is configured yet. local_token: "" if there is none. open_admin: everybody may change an open mesh.
    closed_paths: open paths that nevertheless need a key on a closed mesh.
    cors_origins: origins that may call from a browser, besides those of localhost; in lower case. SCHEME://* allows
    all of a scheme. member_origins: the current origins of the live members, because the page of one member
    switches to another when its node dies.
    allowed_hosts: names of this node in Host headers, besides local names; in lower case.
    """

    keys: KeyFile | None = None
    needs_key: bool = False
    local_token: str = ""
    open_admin: bool = False
    closed_paths: frozenset[str] = frozenset()
    cors_origins: frozenset[str] = msgspec.field(default_factory=frozenset)
    member_origins: Callable[[], Set[str]] = frozenset
    allowed_hosts: frozenset[str] = msgspec.field(default_factory=frozenset)
    sessions: PageSessions | None = None

    @property
    def is_open(self) -> bool:
        """Whether callers without a key may read and chat."""
        return not self.needs_key and not (self.keys and self.keys.configured)

    def can_end(self, key_id: str) -> bool:
        """Whether this caller's right can be taken away while its call runs: true for a key or a session."""
        return key_id not in ("", LOCAL.key_id)

    def has_ended(self, key_id: str) -> bool:
        """Whether a key or session that was valid has been revoked."""
        number = number_of(key_id)
        return self.keys is not None and self.keys.has_ended(number or key_id, is_key=not number)

    def allows_origin(self, origin: str) -> bool:
        origin = origin.lower()
        named = {"*", origin, f"{origin.partition('://')[0]}://*"} & self.cors_origins
        if named or _is_localhost(origin):
            return True
        return origin in self.member_origins()

    def allows_host(self, host: str) -> bool:
        """Whether a Host header is an address, a name that only the local network resolves, or an allowed name."""
        name = _hostname(f"//{host}").rstrip(".")
        if "*" in self.allowed_hosts or name in self.allowed_hosts or is_local_host(name):
            return True
        return bool(name) and name in {_hostname(origin) for origin in self.cors_origins if _is_web(origin)}

    def describe(self) -> str:
        """The access rules in one line."""
        if not self.is_open:
            return "closed: every call needs a key, or the local token, which exo-mesh on this machine sends"
        if self.open_admin:
            return "open to all (--open-admin): anybody who reaches this address may read, chat and change everything"
        return (
            "open: anybody who reaches this address may read and chat; "
            "changes need the local token, which exo-mesh on this machine sends"
        )


def guard(policy: AccessPolicy, roles: RouteRoles) -> Middleware:
    """The middleware that checks access. It looks at headers only, so the body of a refused request is never read."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        caller = _caller(request, policy)
        resource = request.match_info.route.resource
        path = resource.canonical if resource else request.path
        role = roles.needed(request.method, path)
        if reply := (
            _preflight(request, policy)  # browsers send no key with it, so it comes before all other checks
            or _misdirected(request, policy, caller)
            or _cross_site(request, role, policy)
            or _not_allowed(request, _closed(role, path, policy), caller)
        ):
            return reply
        request[CALLER] = caller
        return await handler(request)

    return check


def send_cors_headers(policy: AccessPolicy, request: web.Request, response: web.StreamResponse) -> None:
    """Add the CORS headers that let pages of allowed origins read the reply."""
    origin = request.headers.get(hdrs.ORIGIN)
    response.headers.add(hdrs.VARY, hdrs.ORIGIN)
    if origin and policy.allows_origin(origin):
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = (
            "x-request-id, request-id, retry-after, x-exo-mesh-max-tokens, x-exo-mesh-stream-secret, x-trace-id, "
            "traceresponse"
        )


def _caller(request: web.Request, policy: AccessPolicy) -> Caller:
    """The caller, identified only by its key or token. An open mesh ignores an unknown key.

    Anthropic's clients send the key as x-api-key, as a bearer token, or one of each; the first valid one counts.
    """
    scheme, _, bearer = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    for given in (bearer if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")):
        text = given.strip()
        if is_token(text, policy.local_token):
            return LOCAL
        if session := policy.sessions.check(text) if policy.sessions else None:
            return Caller(session.id, Role.ADMIN)
        if key := policy.keys.check(text) if policy.keys else None:
            return Caller(key.id, key.role)
    if not policy.is_open:
        return STRANGER
    return ANY_ADMIN if policy.open_admin else ANYBODY


def _closed(role: Role | None, path: str, policy: AccessPolicy) -> Role | None:
    """The role that a call needs: its route's, but USE for an open path in `closed_paths`."""
    return Role.USE if role is None and path in policy.closed_paths else role


def _not_allowed(request: web.Request, role: Role | None, caller: Caller) -> web.Response | None:
    """A refusal if this caller may not make the call, else None. role: the role that the call needs."""
    if role is Role.ADMIN and request.match_info.http_exception is not None:
        role = Role.USE  # no such route: everybody who may read gets a 404 instead of a refusal
    if role is None or (caller.role is not None and caller.role.covers(role)):
        return None
    if caller.role is None:
        return _unknown_caller()
    call = f"{request.method} {request.path}"
    if caller != ANYBODY:
        message = f"{call} needs a key with the role {role}; this key has the role {caller.role}"
        return plain_error("insufficient_permissions", message)
    message = (
        f"{call} changes an open mesh, where callers without local rights may only read and chat. "
        "Use exo-mesh on the node's own machine as the node's user: it sends the token in the file local_token of the "
        "node's home; or send a key (`exo-mesh key new --role admin` on the node makes one; then all calls need a "
        "key); or start the node with --open-admin"
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
    """The answer to a CORS preflight request of an allowed origin; None for any other request."""
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
    """A refusal if the Host header names another host, else None.

    This stops DNS rebinding: a web page can make its own host name resolve to this node, and the browser then treats
    both as one origin. The Host header still shows the foreign name. Such a page has no key, so calls with a key pass;
    a program that sends no Host header is not a browser.
    """
    host = request.headers.get(hdrs.HOST)
    if host is None or caller.key_id or policy.allows_host(host):
        return None
    message = (
        f"the Host header {quoted(host)} does not name this node; "
        "start the node with --allowed-hosts to add a name, or send a key"
    )
    return plain_error("misdirected_request", message)


def _cross_site(request: web.Request, role: Role | None, policy: AccessPolicy) -> web.Response | None:
    """A refusal if a page of another origin tries to change something or to read more than the open paths, else None.

    The browser would not show the page the answer, but a read can still be costly, such as asking all peers. Programs
    that are not browsers send neither Origin nor Sec-Fetch-Site.
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
    return plain_error("cross_site_refused", _cross_site_message(origin or ""))


def _cross_site_message(origin: str) -> str:
    """Says how the origin of a refused page can be allowed. origin: "" if the page sent none."""
    if not origin:
        return "web pages of other sites may not call this API; start the node with --cors-origin ORIGIN to allow one"
    if origin == "null":
        return (
            "pages without an origin of their own (a local file, a sandboxed frame) may not call this API: serve the "
            "page over HTTP and name its origin with --cors-origin, or let all pages call with --cors-origin '*'"
        )
    refused = f"pages of {quoted(origin)} may not call this API"
    try:
        named = values.origin(_MADE_UP_HOST.sub("*", origin.lower()))
    except ValueError:
        return refused
    return f"{refused}; start the node with --cors-origin '{named}' to allow them"


def is_local_host(name: str) -> bool:
    """Whether a host is an address, or a name that only the local network resolves."""
    return bool(name) and (_is_address(name) or "." not in name or name.endswith(_LAN_SUFFIXES))


def _is_localhost(origin: str) -> bool:
    """Whether a web origin is on the browser's own machine."""
    name = _hostname(origin)
    local = name == "localhost" or name.endswith(".localhost") or (_is_address(name) and _is_loopback(name))
    return local and _is_web(origin)


def _is_web(origin: str) -> bool:
    """Whether an origin belongs to a web site, rather than to a desktop program or a browser's extension."""
    return origin.startswith(("http://", "https://"))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _netloc(origin: str) -> str:
    """host:port of a web origin, in lower case; "" if the header is not a valid URL of HTTP."""
    try:
        return urlsplit(origin).netloc.lower() if _is_web(origin.lower()) else ""
    except ValueError:
        return ""


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
