"""What an instance keeps in its prefix cache, as a short list of hashes that its driver publishes. Pure.

An entry peer finds in it how much of a prompt the instance has kept, whichever peer the earlier prompt came in at. The
list has no tokens. A hash is of all tokens of a prompt up to the end of a block, keyed with a random salt of the
driver, so that lists of two instances cannot be compared with each other or with a table.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence

from exo_mesh.domain.images import PictureSpec, content_of_prompt

BLOCK_TOKENS = 64
"""Prompts are compared by whole blocks, as in the prefix cache of an instance."""

SALT_BYTES = 8
MAX_ENTRIES = 170
"""Most hashes of one digest, which then has 1,028 bytes."""

MOST_BLOCKS = 2**16 - 1

_HASH_BYTES = 8
_BLOCK_BYTES = BLOCK_TOKENS * array("I").itemsize
_ENTRY = struct.Struct("<HI")
"""The number of blocks, and the first 32 bits of the keyed hash of all their tokens. With 170 of them, a prompt is
mistaken for a kept one about once in 10^7 requests; it then only goes to another instance."""

MAX_BYTES = SALT_BYTES + MAX_ENTRIES * _ENTRY.size


def prompt_hashes(tokens: Sequence[int], scope: bytes = b"", pictures: Sequence[PictureSpec] = ()) -> list[bytes]:
    """A hash for each whole block of a prompt, of all tokens up to its end. scope: see GenerateRequest.cache_scope."""
    content = array("I", content_of_prompt(tokens, pictures)).tobytes()
    return list(hashes_at(content, range(1, len(content) // _BLOCK_BYTES + 1), scope))


def hashes_at(content: bytes, counts: Iterable[int], scope: bytes = b"") -> Iterator[bytes]:
    """The hashes of the first `count` blocks of a content (4 bytes for each token), for ascending counts."""
    running = hashlib.blake2b(digest_size=_HASH_BYTES, key=scope)
    at = 0
    for count in counts:
        stop = count * _BLOCK_BYTES
        running.update(content[at:stop])
        at = stop
        yield running.copy().digest()


def sampled_counts(num_blocks: int) -> list[int]:
    """The numbers of blocks at which a kept sequence is hashed, ascending: its end, and two in each power of two before
    it. A prompt that shares only a part of the sequence then counts at least two thirds of the shared blocks."""
    counts, step = {num_blocks}, 1
    while step < num_blocks:
        counts |= {step, step + step // 2} if step + step // 2 < num_blocks else {step}
        step *= 2
    return sorted(counts)


def entry_of(salt: bytes, count: int, block_hash: bytes) -> bytes:
    """One entry of a digest. count: of blocks, at most MOST_BLOCKS."""
    keyed = hashlib.blake2b(block_hash, digest_size=4, key=salt).digest()
    return _ENTRY.pack(count, int.from_bytes(keyed, "little"))


def pack(salt: bytes, entries: Collection[bytes]) -> bytes:
    """A digest with the first MAX_ENTRIES entries, the most valuable first; b"" without entries."""
    return salt + b"".join(list(entries)[:MAX_ENTRIES]) if entries else b""


def shortened(digest: bytes, max_bytes: int) -> bytes:
    """A digest without its least valuable entries; b"" if no entry has room."""
    room = (max_bytes - SALT_BYTES) // _ENTRY.size
    return digest[: SALT_BYTES + room * _ENTRY.size] if room > 0 else b""


def is_digest(digest: bytes) -> bool:
    """Whether the length of a digest that another peer sent is right."""
    return SALT_BYTES < len(digest) <= MAX_BYTES and (len(digest) - SALT_BYTES) % _ENTRY.size == 0


def kept_tokens(digest: bytes, hashes: Sequence[bytes]) -> int:
    """How many first tokens of a prompt are in the digest of an instance, at least. hashes: of prompt_hashes."""
    known: dict[int, set[bytes]] = {}
    for at in range(SALT_BYTES, len(digest), _ENTRY.size):
        entry = digest[at : at + _ENTRY.size]
        count = int.from_bytes(entry[:2], "little")
        if 0 < count <= len(hashes):
            known.setdefault(count, set()).add(entry)
    salt = digest[:SALT_BYTES]
    for count in sorted(known, reverse=True):
        if entry_of(salt, count, hashes[count - 1]) in known[count]:
            return count * BLOCK_TOKENS
    return 0
