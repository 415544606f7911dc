"""A small client of a node's HTTP API. It uses only the standard library, so that short commands start fast."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_mesh.client.trust import certificate_of, default_url, tls_failure, trust
from exo_mesh.errors import DeadlineError, MeshError, TransportError, error_from_code
from exo_mesh.printable import ANSWER_CHARS, printable, printable_values
from exo_mesh.security.local_token import token_for
from exo_mesh.settings.config import ConfigError, home_of
from exo_mesh.settings.places import DEFAULT_API_URL

READ_DEADLINE_S = 10.0
STREAM_SILENCE_S = 120.0
"""The API sends a keep-alive comment at least every 10 s; after this much silence the client treats it as gone."""


class NoNodeError(TransportError):
    """No node answers at the API address."""

    code = "no_node"


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer of any status. retry_after_s: the node's Retry-After; None without one."""

    status: int
    body: Any
    retry_after_s: float | None = None


class ApiClient:
    """Calls a node's HTTP API with deadlines. Each failure is a MeshError, with the server's message if it sent one."""

    def __init__(
        self, url: str | None = None, home: Path | str | None = None, own_certificate: Path | None = None
    ) -> None:
        """home: the home directory of a node on this machine; without an API key the client sends that node's local
        token. own_certificate: the certificate of that node, if it serves HTTPS; None looks it up in its settings."""
        chosen = url or os.environ.get("EXO_MESH_API_URL") or default_url(home, own_certificate)
        self.url = base_url(chosen)
        parts, hostname = _parts_of(self.url)
        self._address = hostname, _port_of(parts)
        self._home = Path(home) if home else home_of(os.environ)
        self._own_certificate = own_certificate
        self._shows_key = True
        # no proxy from the environment: it could not reach a node on this machine
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if parts.scheme == "https":
            context = trust(hostname, own_certificate or certificate_of(home))
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def credentials(self) -> dict[str, str]:
        """The Authorization header with EXO_MESH_API_KEY, else with the home's local token; {} without either."""
        key = (os.environ.get("EXO_MESH_API_KEY") if self._shows_key else "") or self.local_token()
        return {"Authorization": f"Bearer {key}"} if key else {}

    def local_token(self) -> str:
        """The local token of the home; "" if no node with this home serves the address."""
        return token_for(self._home, *self._address)

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
        return other

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
                raise _http_error(exc, path) from None

    def _send(
        self, method: str, path: str, body: Any, deadline_s: float, more_headers: Mapping[str, str] | None
    ) -> Any:
        """The response to a call. Raises HTTPError for an error status, else a MeshError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.credentials(), **(more_headers or {})}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            return self._opener.open(request, timeout=deadline_s)
        except urllib.error.HTTPError:
            raise
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
    """The URL below which a node's API is: http:// is added, and /v1 with what follows is cut off, because other
    clients want that. Raises ConfigError."""
    parts, _ = _parts_of(text if "//" in text else f"http://{text}")
    return f"{parts.scheme}://{parts.netloc}" + re.sub(r"/+(v1(/.*)?)?$", "", parts.path, flags=re.DOTALL)


def _port_of(parts: urllib.parse.SplitResult) -> int | None:
    try:
        return parts.port
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
    code, message = str(error.get("code") or ""), str(error["message"])
    if code == "invalid_api_key":
        message += "; set EXO_MESH_API_KEY to a valid key"
    return error_from_code(code, message)
