"""Calls the API of the inviting node on behalf of a joiner; exo_mesh.security.joining explains the protocol."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from exo_mesh.base.printable import printable
from exo_mesh.errors import InputError, MeshError, TransportError, error_from_code
from exo_mesh.security.joining import Gift, Side, Transcript, proof, shown_name, unseal

DEADLINE_S = 10.0
MAX_ANSWER_BYTES = 64 * 1024
MAX_MESSAGE_CHARS = 500


def fetch(url: str, password: str, name: str) -> Gift:
    """Run the exchange with the node at an HTTP address. Raises MeshError. The code itself is never sent."""
    side, name = Side("A", password), shown_name(name)
    answer = _post(url, {"hello": _text(side.hello), "name": name})
    theirs = _binary(answer.get("hello"))
    transcript = Transcript(side.hello, theirs, str(answer.get("exchange")), name)
    try:
        key = side.finish(theirs)
    except InputError as exc:
        raise TransportError(f"{url} did not answer like an inviting node") from exc
    sealed = _post(url, {"exchange": transcript.exchange, "proof": _text(proof(key, transcript))}).get("sealed")
    return unseal(_binary(sealed), key, transcript)


def _post(url: str, body: dict[str, str]) -> dict[str, Any]:
    """POST /v1/join without a proxy and without credentials: the other side is unknown until the exchange is
    complete."""
    # The exchange itself authenticates the other side, so an untrusted certificate is acceptable.
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)]
    try:
        request = urllib.request.Request(
            f"{url}/v1/join", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(*handlers).open(request, timeout=DEADLINE_S) as response:
            answer = json.loads(response.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as exc:
        with exc:
            raise _refusal(url, exc) from None
    except (OSError, http.client.HTTPException, ValueError) as exc:
        why = getattr(exc, "reason", None) or exc
        raise TransportError(f"no node answers at {url} ({why}); give another address with --peer HOST:PORT") from exc
    if not isinstance(answer, dict):
        raise TransportError(f"{url} did not answer like an inviting node")
    return answer


def _refusal(url: str, answer: urllib.error.HTTPError) -> MeshError:
    try:
        error = json.loads(answer.read(MAX_ANSWER_BYTES))["error"]
        return error_from_code(str(error["code"]), printable(str(error["message"]), MAX_MESSAGE_CHARS))
    except (OSError, ValueError, KeyError, TypeError):
        return MeshError(f"{url}/v1/join answered with HTTP status {answer.code}")


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _binary(text: object) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except ValueError as exc:
        raise TransportError("the other side did not answer like an inviting node") from exc
