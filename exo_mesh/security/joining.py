"""The protocol by which a machine with a one-time code gets a mesh's secret over a line that anybody may read or
change.

SPAKE2 (RFC 9382; here Ed25519, of the `spake2` package) derives a key from the password in the code. A listener learns
nothing against which a guess could be checked; a participant can check one guess per exchange:

    joiner   -> inviter   hello (its SPAKE2 element) and its name
    inviter  -> joiner    hello and the number of the exchange
    joiner   -> inviter   a proof that it has the same key; a wrong one counts as a wrong code
    inviter  -> joiner    the secret, encrypted with that key

The joiner proves first, so an unfinished exchange reveals nothing to a stranger. Proof and encryption have their own
keys (HKDF-SHA256), which depend on the whole transcript: a changed name, number or element invalidates the proof.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from exo_mesh.base.printable import printable
from exo_mesh.errors import InputError, TransportError
from exo_mesh.security.secret import parse_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

HELLO_BYTES = 33
PROOF_BYTES = 32
NONCE_BYTES = 12

MAX_NAME_CHARS = 64

PASSWORD_CHARS = 12
ALPHABET = "abcdefghjkmnpqrstvwxyz23456789"
"""30 characters that are hard to confuse: twelve of them are 58 bits, and an attacker has five guesses."""

_PROTOCOL = b"exo-mesh join v1"
_SIDES = {"A": b"joiner", "B": b"inviter"}


@dataclass(frozen=True, slots=True)
class Gift:
    """The data that a machine needs to become a member. node: the name of the inviting node. peer: "host:port" at which
    it talks to peers, for a machine that does not discover it."""

    secret: str = field(repr=False)
    namespace: str
    node: str
    peer: str


class Transcript(msgspec.Struct, frozen=True):
    """Everything that both sides know of an exchange except the password."""

    joiner_hello: bytes
    inviter_hello: bytes
    exchange: str
    joiner_name: str

    @property
    def digest(self) -> bytes:
        parts = (_PROTOCOL, self.joiner_hello, self.inviter_hello, self.exchange.encode(), self.joiner_name.encode())
        return hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).digest()


def new_password() -> str:
    """Twelve random characters in groups of four that can be read aloud."""
    drawn = "".join(secrets.choice(ALPHABET) for _ in range(PASSWORD_CHARS))
    return "-".join(drawn[start : start + 4] for start in range(0, PASSWORD_CHARS, 4))


def parse_password(text: str) -> str:
    """The password that a person typed, ignoring case and the separators of groups. Raises InputError."""
    drawn = re.sub(r"[\s-]", "", text.lower())
    if not re.fullmatch(f"[{ALPHABET}]{{{PASSWORD_CHARS}}}", drawn):
        raise InputError("this is not a code of `exo-mesh invite`, which looks like 192.168.1.5:52415/abcd-efgh-jkmn")
    return drawn


def shown_name(name: str) -> str:
    """The name of a joiner, made safe for a log and a terminal. Both sides use it in the transcript."""
    return printable(name, MAX_NAME_CHARS)


class Side:
    """One side of a SPAKE2 exchange, used for one exchange only. letter: "A" is the joiner, "B" the inviter."""

    def __init__(self, letter: str, password: str) -> None:
        import spake2  # takes 45 ms to import; only needed to join

        kind = {"A": spake2.SPAKE2_A, "B": spake2.SPAKE2_B}[letter]
        self._other = b"B" if letter == "A" else b"A"
        self._spake: Any = kind(parse_password(password).encode(), idA=_SIDES["A"], idB=_SIDES["B"])
        self.hello: bytes = self._spake.start()

    def finish(self, hello: bytes) -> bytes:
        """The key, equal on both sides if they have the same password. Raises InputError for an invalid hello."""
        from spake2 import SPAKEError

        if len(hello) != HELLO_BYTES or not hello.startswith(self._other):
            raise InputError("hello is not a first message of the other side", param="hello")
        try:
            key: bytes = self._spake.finish(hello)
        except (SPAKEError, ValueError) as exc:
            raise InputError("hello is not a valid SPAKE2 element", param="hello") from exc
        return key


def proof(key: bytes, transcript: Transcript) -> bytes:
    """The proof that the joiner has the key."""
    return _derive(key, transcript, b"proof of the joiner")


def proves(given: bytes, key: bytes, transcript: Transcript) -> bool:
    """Whether the given proof is correct. Takes constant time."""
    return hmac.compare_digest(given, proof(key, transcript))


def seal(gift: Gift, key: bytes, transcript: Transcript) -> bytes:
    """Encrypts the gift so that only the joiner of this exchange can read it."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    text = json.dumps(asdict(gift)).encode()
    return nonce + _cipher(key, transcript).encrypt(nonce, text, transcript.digest)


def unseal(sealed: bytes, key: bytes, transcript: Transcript) -> Gift:
    """Decrypts a sealed gift. Raises TransportError if the inviter of this exchange did not seal it."""
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
