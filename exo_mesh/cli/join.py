"""Join a mesh with a secret: `join CODE`, with the code that `exo-mesh invite` prints on a machine of the mesh.

The secret is stored in the node's home, where only you can read it; `exo-mesh` alone uses it from then on. The code
works once. The line to the other machine need not be secret, and who answers there must know the code as well.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.errors import InputError, MeshError, TransportError, error_from_code
from exo_mesh.security.joining import Gift, Side, Transcript, parse_password, printable, proof, shown_name, unseal
from exo_mesh.security.secret import write_new
from exo_mesh.settings.config import SECRET_FILE_NAME, ConfigError, Settings, load_settings

DEADLINE_S = 10.0
MAX_ANSWER_BYTES = 64 * 1024
MAX_MESSAGE_CHARS = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """CODE, `--peer`, `--out`, `--home`."""
    parser.add_argument("code", metavar="CODE", help="what `exo-mesh invite` printed: HOST:PORT/abcd-efgh-jkmn")
    parser.add_argument("--peer", metavar="HOST:PORT", help="the inviting node's API, instead of the code's address")
    parser.add_argument("--out", type=Path, metavar="FILE", help="store the secret here instead of in the home")
    parser.add_argument("--home", action="append", metavar="DIR", help="the home of the node, as in `exo-mesh --home`")


def run(args: argparse.Namespace) -> int:
    """Fetch the secret, store it, and say what to do next."""
    settings = load_settings({"home": args.home} if args.home else {}, os.environ).settings
    address, _, password = args.code.strip().rpartition("/")
    address = (args.peer or address).rstrip("/")
    parse_password(password)
    if not address:
        raise ConfigError("this code has no address: name the API of the inviting node with --peer HOST:PORT")
    target = _target(settings, args.out)
    gift = fetch(address, password, settings.name)
    write_new(target, gift.secret)
    start = "exo-mesh" if args.out is None else f"exo-mesh --secret-file {target}"
    start += "" if gift.namespace == settings.namespace else f" --namespace {gift.namespace}"
    print(f"joined the mesh of {gift.node}: its secret is in {target}")
    print(
        f"start `{start}`; a node that runs here already must be restarted. If it finds no peer, add "
        f"--bootstrap-peers {gift.peer}",
        file=sys.stderr,
    )
    return exit_codes.OK


def fetch(address: str, password: str, name: str) -> Gift:
    """Do the exchange with the node at an address. Raises MeshErrors; nothing of the code is sent."""
    url = address if "//" in address else f"http://{address}"
    side, name = Side("A", password), shown_name(name)
    answer = _post(url, {"hello": _text(side.hello), "name": name})
    theirs = _binary(answer.get("hello"))
    transcript = Transcript(side.hello, theirs, str(answer.get("exchange")), name)
    try:
        key = side.finish(theirs)
    except InputError as exc:
        raise TransportError(f"{url} did not answer as a node that invites") from exc
    sealed = _post(url, {"exchange": transcript.exchange, "proof": _text(proof(key, transcript))}).get("sealed")
    return unseal(_binary(sealed), key, transcript)


def _target(settings: Settings, out: Path | None) -> Path:
    """Where the secret will be, checked before the code is used up."""
    if out is None and settings.secret:
        where = settings.secret_file or "EXO_MESH_SECRET"
        raise ConfigError(f"this machine has a secret already ({where}); remove it, or name another file with --out")
    target = out or settings.home / SECRET_FILE_NAME
    if out is None:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if target.exists():
        raise ConfigError(f"{target} exists; a secret is never overwritten")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"{target.parent} cannot be written")
    return target


def _post(url: str, body: dict[str, str]) -> dict[str, Any]:
    """POST /v1/join, without a proxy and without any key: the callee is a stranger until the exchange is done."""
    # The exchange shows who answers, so a certificate that nobody has signed is good enough.
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
        raise TransportError(f"no node answers at {url} ({why}); --peer HOST:PORT names another address") from exc
    if not isinstance(answer, dict):
        raise TransportError(f"{url} did not answer as a node that invites")
    return answer


def _refusal(url: str, answer: urllib.error.HTTPError) -> MeshError:
    try:
        error = json.loads(answer.read(MAX_ANSWER_BYTES))["error"]
        return error_from_code(str(error["code"]), printable(str(error["message"]), MAX_MESSAGE_CHARS))
    except (OSError, ValueError, KeyError, TypeError):
        return MeshError(f"{url}/v1/join: HTTP status {answer.code}")


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _binary(text: object) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except ValueError as exc:
        raise TransportError("the other side did not answer as a node that invites") from exc
