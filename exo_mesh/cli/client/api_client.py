"""A small client of a node's HTTP API. It uses only the standard library, so that short commands start fast."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.base.printable import ANSWER_CHARS, printable, printable_values
from exo_mesh.cli.client.trust import certificate_of, default_url, homes_of, is_this_machine, tls_failure, trust
from exo_mesh.domain.addresses import base_path
from exo_mesh.errors import DeadlineError, MeshError, TransportError, error_from_code
from exo_mesh.security.local_token import read_token
from exo_mesh.security.own_nodes import OwnNode, is_on_this_machine, node_at, token_for
from exo_mesh.settings.config import ConfigError
from exo_mesh.settings.default_paths import DEFAULT_API_URL

READ_DEADLINE_S = 10.0
SESSION_RETRY_S = 60.0
STREAM_SILENCE_S = 120.0
"""The API sends a keep-alive comment at least every 10 s; after this much silence the client treats it as gone."""


_REFUSED = {"invalid_api_key": "; set EXO_MESH_API_KEY to a valid key", "insufficient_permissions": ""}
"""Codes of refusals for lack of rights, and the remedy if the caller sent a key or calls another machine."""


class NoNodeError(TransportError):
    """No node answers at the API address."""

    code = "no_node"


class HttpAnswer(msgspec.Struct, frozen=True):
    """An answer of any status. retry_after_s: the node's Retry-After; None without one."""

    status: int
    body: Any
    retry_after_s: float | None = None


class MeshSession(msgspec.Struct):
    """The session that a client and those made from it send instead of the local token; text: "" without one.
    tried_at, renew_at: by the monotonic clock."""

    text: str = ""
    id: str | None = None
    tried_at: float = 0.0
    renew_at: float = 0.0


class ApiClient:
    """Calls a node's HTTP API with deadlines. Each failure is a MeshError, with the server's message if it sent one.

    certificate: the one that the node must have, if it serves HTTPS on this machine.
    """

    prefers_token = False
    """Whether the local token is sent even if EXO_MESH_API_KEY is set."""

    def __init__(
        self, url: str | None = None, home: Path | str | None = None, own_certificate: Path | None = None
    ) -> None:
        """home: the home directory of a node on this machine; None means the node of this user that serves the address.
        Without an API key the client sends that node's local token. own_certificate: the certificate of that node, if
        it serves HTTPS; None looks it up."""
        chosen = url or os.environ.get("EXO_MESH_API_URL") or default_url(home, own_certificate)
        self.url = base_url(chosen)
        parts, hostname = _parts_of(self.url)
        self._parts = parts
        self._address = hostname, _port_of(parts)
        self._home = home
        self._own_certificate = own_certificate
        self._shows_key = True
        self._session = MeshSession()
        self._is_member = False
        self.certificate: Path | None = None
        # no proxy from the environment: it could not reach a node on this machine
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if parts.scheme == "https":
            node = None if own_certificate else self.own_node()
            self.certificate = own_certificate or (node.certificate if node else None) or certificate_of(home)
            context = trust(hostname, self.certificate)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def credentials(self) -> dict[str, str]:
        """The Authorization header with EXO_MESH_API_KEY, else with the session or the local token; {} without."""
        return self._rights()[0]

    def local_token(self) -> str:
        """The local token of the home; "" if no node with this home serves the address."""
        return token_for(homes_of(self._home), *self._address)

    def own_node(self) -> OwnNode | None:
        """The node of this user that serves the address; None if another program or another user's node does."""
        return node_at(homes_of(self._home), *self._address)

    def _rights(self) -> tuple[dict[str, str], str]:
        """(the Authorization header, the address to dial). The local token goes only to the address that its node is
        bound to, also if the host is a name that has several. A session goes there, and to other members: on this
        machine, where any user may take the port of a dead one, only to a node of this user."""
        key = os.environ.get("EXO_MESH_API_KEY", "") if self._shows_key else ""
        node = None
        if (not key or self.prefers_token) and (node := self.own_node()):
            key = ("" if self.prefers_token else self._session.text) or read_token(node.home) or key
        elif not key and self._is_member and self._session.text:
            node = node_at(homes_of(None), *self._address)
            key = self._session.text if node or not is_on_this_machine(self._address[0]) else ""
        return {"Authorization": f"Bearer {key}"} if key else {}, self._dialled(node)

    def _dialled(self, node: OwnNode | None) -> str:
        """The URL to call: with the address that this node of the user is bound to, if one serves it."""
        host, port = self._address
        address = node.address_for(host) if node else host
        if address == host or self._parts.scheme != "http":
            return self.url
        netloc = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        return self._parts._replace(netloc=netloc).geturl().rstrip("/")

    def _forgot_session(self, refused: str | None) -> bool:
        """After a node refused this Authorization: whether that was the session, and the local token takes its place.
        It was revoked, or it ended while this machine slept, so a new one is made soon."""
        session = self._session
        if not session.text or refused != f"Bearer {session.text}":
            return False
        session.renew_at = min(session.renew_at, session.tried_at + SESSION_RETRY_S)
        if not self.local_token():  # only this member refuses it: its clock may be wrong
            return False
        session.text = ""
        return True

    def _no_rights(self) -> str:
        """Why a call to this machine carried no rights, with the remedy; "" if it carried some, or went elsewhere."""
        if self._rights()[0] or not is_this_machine(self._address[0]):
            return ""
        if self._home:
            home = printable(str(self._home))
            return f"; no node with the home {home} serves {self.url}: leave out --home, or set EXO_MESH_API_KEY"
        return (
            f"; {self.url} is not your node: run the command as the user who started that node, "
            "or set EXO_MESH_API_KEY to a key of that node"
        )

    def is_open(self) -> bool:
        """Whether callers without a key may chat. Raises MeshError."""
        try:
            with self._open("GET", "/v1/models", None, READ_DEADLINE_S, {"Authorization": ""}):
                return True
        except MeshError as exc:
            if exc.code != "invalid_api_key":
                raise
            return False

    def get(self, path: str, deadline_s: float = READ_DEADLINE_S) -> Any:
        """The JSON at `path`. Every text in it is made printable, because names and errors come from other peers."""
        return printable_values(self._call("GET", path, None, deadline_s), ANSWER_CHARS)

    def post(self, path: str, body: Any, deadline_s: float = READ_DEADLINE_S) -> Any:
        """POST `body` and return the JSON answer."""
        return self._call("POST", path, body, deadline_s)

    def put(self, path: str, body: Any, deadline_s: float = READ_DEADLINE_S) -> Any:
        """PUT `body` and return the JSON answer, with every text in it made printable."""
        return printable_values(self._call("PUT", path, body, deadline_s), ANSWER_CHARS)

    def delete(self, path: str, deadline_s: float = READ_DEADLINE_S) -> Any:
        """DELETE `path` and return the JSON answer."""
        return self._call("DELETE", path, None, deadline_s)

    def text(self, path: str, deadline_s: float = READ_DEADLINE_S) -> str:
        """GET `path` and return its plain text."""
        with self._open("GET", path, None, deadline_s) as response:
            try:
                data: bytes = response.read()
            except (OSError, http.client.HTTPException) as exc:
                raise TransportError(f"the connection to {self.url} broke during the answer to {path}") from exc
        return data.decode(errors="replace")

    def at(self, url: str, *, with_key: bool) -> ApiClient:
        """A client of another node, with the same home. with_key: send that node the key of EXO_MESH_API_KEY. Raises
        ConfigError for an invalid address."""
        other = ApiClient(url, self._home, self._own_certificate)
        other._shows_key = with_key
        if with_key:
            other._session, other._is_member = self._session, True
        return other

    def open_session(self) -> None:
        """Exchanges the local token for a session, which every member of a closed mesh accepts also after this node has
        died. Renews it after half of its time. Does nothing without local rights, or if this client sends a key."""
        session = self._session
        if time.monotonic() < session.renew_at or os.environ.get("EXO_MESH_API_KEY") or not (own := self.local_token()):
            return
        session.tried_at = time.monotonic()
        session.renew_at = session.tried_at + SESSION_RETRY_S
        headers = {"Authorization": f"Bearer {own}"}
        made = self.exchange("/v1/session", {"id": session.id}, READ_DEADLINE_S, headers).body
        if made.get("key"):  # a node of an older version has none
            session.id, session.text = str(made["id"]), str(made["key"])
            session.renew_at = time.monotonic() + float(made["valid_s"]) / 2

    def stream(
        self,
        path: str,
        body: Any,
        on_comment: Callable[[str], object] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        silence_s: float = STREAM_SILENCE_S,
    ) -> Iterator[dict[str, Any]]:
        """Yields the events of a server-sent event stream, until `[DONE]`. Closing the iterator closes the connection.

        body: None sends a GET request. on_comment: called with the printable text of each comment.
        """
        with self._open("GET" if body is None else "POST", path, body, silence_s, headers) as response:
            try:
                for line in response:
                    if on_comment is not None and line.startswith(b":"):
                        on_comment(printable(line[1:].decode(errors="replace").strip()))
                    if not line.startswith(b"data:"):
                        continue  # skip a comment, or the empty line after an event
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    event: dict[str, Any] = json.loads(data)
                    if "error" in event:
                        raise _server_error(event)
                    yield event
            except TimeoutError as exc:
                raise DeadlineError(f"{self.url} sent nothing for {silence_s:.0f} s") from exc
            except (OSError, http.client.HTTPException, ValueError) as exc:
                raise TransportError(f"the stream from {self.url} ended early or is damaged") from exc
        raise TransportError(f"the stream from {self.url} ended early")

    def _call(self, method: str, path: str, body: Any, deadline_s: float) -> Any:
        with self._open(method, path, body, deadline_s) as response:
            try:
                data = response.read()
                return json.loads(data) if data else {}
            except TimeoutError as exc:
                raise DeadlineError(f"{self.url}{path} did not answer within {deadline_s:g} s") from exc
            except (OSError, http.client.HTTPException, ValueError) as exc:
                raise TransportError(f"{self.url}{path} did not answer with JSON") from exc

    def exchange(self, path: str, body: Any, deadline_s: float, headers: Mapping[str, str] | None = None) -> HttpAnswer:
        """POST `body` and return the answer, also if it is an error. Raises TransportError or DeadlineError if there is
        none."""
        try:
            response = self._send("POST", path, body, deadline_s, headers)
        except urllib.error.HTTPError as exc:
            response = exc
        with response:
            try:
                wait = response.headers.get("Retry-After", "")
                found = json.loads(response.read())
                return HttpAnswer(response.status, found, float(wait) if wait.isdigit() else None)
            except (OSError, http.client.HTTPException, ValueError) as exc:
                raise TransportError(f"{self.url}{path} did not answer with JSON") from exc

    def _open(
        self, method: str, path: str, body: Any, deadline_s: float, more_headers: Mapping[str, str] | None = None
    ) -> Any:
        try:
            return self._send(method, path, body, deadline_s, more_headers)
        except urllib.error.HTTPError as exc:
            with exc:
                error = _http_error(exc, path)
            if error.code not in _REFUSED:
                raise error from None
            hint = self._no_rights() or _REFUSED[error.code]
            raise error_from_code(error.code, f"{error}{hint}") from None

    def _send(
        self, method: str, path: str, body: Any, deadline_s: float, more_headers: Mapping[str, str] | None
    ) -> Any:
        """The response to a call. Raises HTTPError for an error status, else a MeshError."""
        data = None if body is None else json.dumps(body).encode()
        rights, base = self._rights()
        headers = {"Content-Type": "application/json", **rights, **(more_headers or {})}
        request = urllib.request.Request(base + path, data, headers, method=method)
        try:
            return self._opener.open(request, timeout=deadline_s)
        except urllib.error.HTTPError as exc:
            if exc.code != http.HTTPStatus.UNAUTHORIZED or not self._forgot_session(headers.get("Authorization")):
                raise
            exc.close()
            return self._send(method, path, body, deadline_s, more_headers)
        except TimeoutError as exc:
            raise DeadlineError(f"{self.url}{path} did not answer within {deadline_s:g} s") from exc
        except (OSError, http.client.HTTPException) as exc:
            if isinstance(getattr(exc, "reason", None), TimeoutError):
                raise DeadlineError(f"{self.url}{path} did not answer within {deadline_s:g} s") from exc
            if isinstance(reason := getattr(exc, "reason", exc), ssl.SSLError):
                raise TransportError(tls_failure(self.url, reason)) from exc
            if self.url.startswith("http:") and isinstance(reason, ConnectionResetError):
                raise TransportError(
                    f"{self.url} closed the connection; if it serves HTTPS, use --api-url https://…"
                ) from exc
            raise NoNodeError(
                f"no node answers at {self.url}; start one with `exo-mesh`, or give its address with --api-url"
            ) from exc


def _parts_of(url: str) -> tuple[urllib.parse.SplitResult, str]:
    """The parts and the host name of an address that http.client can call. Raises ConfigError for any other."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:  # a bracket of an IPv6 address is missing
        parts = urllib.parse.SplitResult("", "", "", "", "")
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.netloc.isascii():
        raise ConfigError(f"--api-url {printable(url)}: not an HTTP address; use one such as {DEFAULT_API_URL}")
    return parts, parts.hostname


def base_url(text: str) -> str:
    """The URL below which a node's API is: http:// is added, and a last /v1 is cut off, because other clients
    want that; see base_path. An address without http:// is completed with the host and port of the default. Raises
    ConfigError."""
    usual = urllib.parse.urlsplit(DEFAULT_API_URL)
    is_whole = "//" in text
    parts, _ = _parts_of(
        text if is_whole else f"http://{usual.hostname}{text}" if text[:1] == ":" else f"http://{text}"
    )
    port = "" if is_whole or parts.netloc.rpartition("]")[2].count(":") else f":{usual.port}"
    return f"{parts.scheme}://{parts.netloc}{port}{base_path(parts.path)}"


def _port_of(parts: urllib.parse.SplitResult) -> int:
    try:
        return parts.port if parts.port is not None else http.client.HTTPS_PORT if parts.scheme == "https" else 80
    except ValueError as exc:
        raise ConfigError(f"--api-url {parts.geturl()}: {exc}") from exc


def _http_error(answer: urllib.error.HTTPError, path: str) -> MeshError:
    try:
        return _server_error(json.loads(answer.read()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return MeshError(f"{path}: HTTP status {answer.code}")


def _server_error(event: dict[str, Any]) -> MeshError:
    """The error in an answer of OpenAI's form, `{"error": {"message", "code", ...}}`."""
    error = event["error"]
    return error_from_code(str(error.get("code") or ""), str(error["message"]))
