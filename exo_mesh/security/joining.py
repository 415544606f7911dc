"""How a machine that knows a one-time code gets the secret of a mesh, over a line that anybody may read or change.

SPAKE2 (RFC 9382; here Ed25519, of the `spake2` package) makes a key from the password in the code. Who listens learns
nothing that a guess could be checked against; who takes part can check one guess for each exchange:

    joiner   -> inviter   hello (its SPAKE2 element) and its name
    inviter  -> joiner    hello and the number of the exchange
    joiner   -> inviter   a proof that it has the same key; a wrong one counts as a wrong code
    inviter  -> joiner    the secret, encrypted with that key

The joiner proves first, so an exchange that is left half-way tells a stranger nothing. Proof and encryption have keys
of their own (HKDF-SHA256) that depend on all that was said: a changed name, number or element makes the proof wrong.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from exo_mesh.errors import InputError, TransportError
from exo_mesh.printable import printable
from exo_mesh.security.secret import parse_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

HELLO_BYTES = 33
PROOF_BYTES = 32
NONCE_BYTES = 12

MAX_NAME_CHARS = 64

PASSWORD_CHARS = 12
ALPHABET = "abcdefghjkmnpqrstvwxyz23456789"
"""30 characters that are not taken for each other: twelve of them are 58 bits, and there are five guesses."""

_PROTOCOL = b"exo-mesh join v1"
_SIDES = {"A": b"joiner", "B": b"inviter"}


@dataclass(frozen=True, slots=True)
class Gift:
    """What a machine needs to be a member. node: the name of the inviting node. peer: "host:port" where it talks to
    peers, for a machine that does not find it by itself."""

    secret: str = field(repr=False)
    namespace: str
    node: str
    peer: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """All that both sides know of an exchange besides the password."""

    joiner_hello: bytes
    inviter_hello: bytes
    exchange: str
    joiner_name: str

    @property
    def digest(self) -> bytes:
        parts = (_PROTOCOL, self.joiner_hello, self.inviter_hello, self.exchange.encode(), self.joiner_name.encode())
        return hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).digest()


def new_password() -> str:
    """Twelve random characters, in groups that can be read out."""
    drawn = "".join(secrets.choice(ALPHABET) for _ in range(PASSWORD_CHARS))
    return "-".join(drawn[start : start + 4] for start in range(0, PASSWORD_CHARS, 4))


def parse_password(text: str) -> str:
    """A password as somebody typed it: the case and what separates the groups do not matter. Raises InputError."""
    drawn = re.sub(r"[\s-]", "", text.lower())
    if not re.fullmatch(f"[{ALPHABET}]{{{PASSWORD_CHARS}}}", drawn):
        raise InputError("this is no code of `exo-mesh invite`; it looks like 192.168.1.5:52415/abcd-efgh-jkmn")
    return drawn


def shown_name(name: str) -> str:
    """The name of a joiner, fit for a log and a terminal. Both sides use it in the transcript."""
    return printable(name, MAX_NAME_CHARS)


class Side:
    """One side of the SPAKE2 exchange, for one exchange only. letter: "A" is the joiner, "B" the inviter."""

    def __init__(self, letter: str, password: str) -> None:
        import spake2  # 45 ms to import, and only needed while somebody joins

        kind = {"A": spake2.SPAKE2_A, "B": spake2.SPAKE2_B}[letter]
        self._other = b"B" if letter == "A" else b"A"
        self._spake: Any = kind(parse_password(password).encode(), idA=_SIDES["A"], idB=_SIDES["B"])
        self.hello: bytes = self._spake.start()

    def finish(self, hello: bytes) -> bytes:
        """The key that both sides have if they have the same password. Raises InputError for what is no hello."""
        from spake2 import SPAKEError

        if len(hello) != HELLO_BYTES or not hello.startswith(self._other):
            raise InputError("hello is not the first message of the other side", param="hello")
        try:
            key: bytes = self._spake.finish(hello)
        except (SPAKEError, ValueError) as exc:
            raise InputError("hello is not an element of the group", param="hello") from exc
        return key


def proof(key: bytes, transcript: Transcript) -> bytes:
    """What shows that the joiner has the key."""
    return _derive(key, transcript, b"proof of the joiner")


def proves(given: bytes, key: bytes, transcript: Transcript) -> bool:
    """Whether it is that proof. Takes the same time whether it is or not."""
    return hmac.compare_digest(given, proof(key, transcript))


def seal(gift: Gift, key: bytes, transcript: Transcript) -> bytes:
    """The gift as only the joiner of this exchange can read it."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    text = json.dumps(asdict(gift)).encode()
    return nonce + _cipher(key, transcript).encrypt(nonce, text, transcript.digest)


def unseal(sealed: bytes, key: bytes, transcript: Transcript) -> Gift:
    """Raises TransportError if this is not what the inviter of this exchange sealed."""
    from cryptography.exceptions import InvalidTag

    try:
        text = _cipher(key, transcript).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], transcript.digest)
        found = json.loads(text)
        names = (printable(str(found[name]), MAX_NAME_CHARS) for name in ("namespace", "node", "peer"))
        return Gift(parse_secret(found["secret"]), *names)
    except (InvalidTag, ValueError, KeyError, TypeError) as exc:
        raise TransportError("the answer does not come from the node that made the code; nothing was stored") from exc


def _cipher(key: bytes, transcript: Transcript) -> ChaCha20Poly1305:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(_derive(key, transcript, b"the secret"))


def _derive(key: bytes, transcript: Transcript, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), 32, transcript.digest, _PROTOCOL + b": " + purpose).derive(key)
