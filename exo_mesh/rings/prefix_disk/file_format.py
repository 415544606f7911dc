"""The bytes of a file with the KV of one sequence at one stage: safetensors with a checksum, sealed in a closed mesh.

A plain file is a safetensors file. Its metadata has the format, the stage that wrote it (`maker`), the key of the
content, the number of positions, the hashes of the blocks, and a CRC-32 of the rest of the header and of the data. It
has no tokens, and no names of classes: tensors have names and one of the dtypes that may cross a hop, and the engine
checks both against its own.

A sealed file has the same bytes in pieces: SEALED, 8 random bytes, then for each piece its length (u32) and its
AES-256-GCM ciphertext. The nonce of a piece is the 8 bytes and the number of the piece, so pieces cannot change places.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import msgspec

from exo_mesh.domain.tensor import ITEM_BYTES, Tensor

FORMAT = "1"
SEALED = b"EXOMKV1\0"
HASH_BYTES = 16
"""Bytes of the key of a content, and of the hash of a block."""

PIECE_BYTES = 2**19
"""Bytes that are checked and written at once, or sealed: about 0.2 ms of a core."""

READ_BYTES = 4 * 2**20
"""Bytes that are read and checked at once."""

MOST_HEADER_BYTES = 8 * 2**20
"""A longer header is not read: 32,768 tensors of 256 bytes of description, or less of both."""

_TAG_BYTES = 16
_NAMES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "int64": "I64",
    "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DTYPES = {theirs: ours for ours, theirs in _NAMES.items()}


class StoredPrefixError(Exception):
    """A file is damaged, cut short, or unusable for this stage."""


class StoredPrefix(msgspec.Struct, frozen=True):
    """What a file says before its tensors. maker: the stage that can use it. key: of the content. length: positions of
    the content. positions: those that the tensors hold, at least as many. blocks: the chained hashes of the blocks,
    HASH_BYTES each. prompt: positions of the content that the same prompt can begin with; prompt_key: their key; 0 and
    b"" if nobody knows."""

    maker: str
    key: bytes
    length: int
    positions: int
    blocks: bytes
    prompt: int = 0
    prompt_key: bytes = b""


def write(stream: IO[bytes], about: StoredPrefix, tensors: Mapping[str, Tensor], secret: bytes | None) -> Iterator[int]:
    """Write a file piece by piece; yields the bytes of each piece twice, after its checksum was computed and after it
    was written, so that the caller can pause. secret: 32 bytes of a key, or None for a plain file. Raises OSError."""
    described = _described(about, tensors)
    checksum = zlib.crc32(json.dumps(described).encode())
    for piece in _pieces_of(tensors):
        checksum = zlib.crc32(piece, checksum)
        yield len(piece)
    header = _header(described, checksum)
    put = _sealer(stream, secret) if secret is not None else stream.write
    put(header)
    yield len(header)
    for piece in _pieces_of(tensors):
        put(piece)
        yield len(piece)


def _memory(size: int) -> memoryview:
    """Writable memory that the kernel clears when it is used: to clear it here would hold up other threads."""
    return memoryview(mmap.mmap(-1, max(1, size)))[:size]


def _pieces_of(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    for tensor in tensors.values():
        yield from _pieces(memoryview(tensor.data).cast("B"), PIECE_BYTES)


def _pieces(data: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def read_about(stream: IO[bytes], secret: bytes | None) -> StoredPrefix:
    """Read what a file says before its tensors. Raises StoredPrefixError if it is no such file, or one of another
    mesh, and OSError."""
    return _read_header(_taker(stream, secret)).about


def read(stream: IO[bytes], secret: bytes | None) -> tuple[StoredPrefix, dict[str, Tensor]]:
    """Read a whole file. Raises StoredPrefixError if any of it is damaged or missing, and OSError."""
    most = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    take = _taker(stream, secret)
    header = _read_header(take)
    if header.size > most:
        raise StoredPrefixError("it is cut short")
    data, checksum = _memory(header.size), header.before
    for place in header.places:
        for piece in _pieces(data[place.start : place.stop], READ_BYTES):
            if secret is not None:
                piece[:] = take(len(piece))
            elif stream.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                raise StoredPrefixError("it is cut short")
            checksum = zlib.crc32(piece, checksum)
    if checksum != header.checksum:
        raise StoredPrefixError("its checksum is wrong")
    tensors = {one.name: Tensor(one.dtype, one.shape, data[one.start : one.stop]) for one in header.places}
    return header.about, tensors


class _TensorPlace(msgspec.Struct, frozen=True):
    """Where a tensor is in the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _FileHeader(msgspec.Struct, frozen=True):
    about: StoredPrefix
    places: tuple[_TensorPlace, ...]
    before: int
    """CRC-32 of the header without its checksum."""
    checksum: int

    @property
    def size(self) -> int:
        return self.places[-1].stop if self.places else 0


def _described(about: StoredPrefix, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the safetensors header says, without the checksum."""
    at = 0
    described: dict[str, Any] = {}
    for name, tensor in tensors.items():
        described[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    metadata = {
        "exo_mesh_kv": FORMAT,
        "maker": about.maker,
        "key": about.key.hex(),
        "length": str(about.length),
        "positions": str(about.positions),
        "blocks": about.blocks.hex(),
        "prompt": str(about.prompt),
        "prompt_key": about.prompt_key.hex(),
    }
    return {"__metadata__": metadata, **described}


def _header(described: Mapping[str, Any], checksum: int) -> bytes:
    """The safetensors header, padded to a multiple of 8 bytes."""
    text = json.dumps({**described, "__metadata__": {**described["__metadata__"], "crc32": str(checksum)}}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _read_header(take: Callable[[int], bytes]) -> _FileHeader:
    (size,) = struct.unpack("<Q", take(8))
    if size > MOST_HEADER_BYTES:
        raise StoredPrefixError(f"its header of {size} bytes is too long")
    try:
        described = json.loads(take(size))
        checksum = int(described["__metadata__"].pop("crc32"))
        before = zlib.crc32(json.dumps(described).encode())
        said = described.pop("__metadata__")
        if said["exo_mesh_kv"] != FORMAT:
            raise StoredPrefixError(f"it has format {said['exo_mesh_kv']}")
        key, blocks = bytes.fromhex(said["key"]), bytes.fromhex(said["blocks"])
        prompt, prompt_key = int(said.get("prompt", 0)), bytes.fromhex(said.get("prompt_key", ""))
        about = StoredPrefix(
            said["maker"], key, int(said["length"]), int(said["positions"]), blocks, prompt, prompt_key
        )
        places = tuple(_places(described))
        return _FileHeader(about, places, before, checksum)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise StoredPrefixError(f"its header is wrong: {type(exc).__name__}") from exc


def _places(described: Mapping[str, Any]) -> Iterator[_TensorPlace]:
    """The tensors in the order of their data. Raises ValueError, KeyError or TypeError if they are not side by side."""
    at = 0
    for name, what in described.items():
        dtype, shape = _DTYPES[what["dtype"]], tuple(map(int, what["shape"]))
        start, stop = what["data_offsets"]
        if start != at or min(shape, default=0) < 0 or stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(name)
        yield _TensorPlace(name, dtype, shape, start, stop)
        at = stop


def _sealer(stream: IO[bytes], secret: bytes) -> Callable[[bytes | memoryview], object]:
    """Writes pieces sealed. The first bytes of the stream are written at once."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # an open mesh avoids this slow import

    cipher, prefix, numbers = AESGCM(secret), os.urandom(8), itertools.count()
    stream.write(SEALED + prefix)

    def put(piece: bytes | memoryview) -> None:
        stream.write(struct.pack("<I", len(piece)))
        stream.write(cipher.encrypt(prefix + struct.pack("<I", next(numbers)), piece, None))

    return put


def _taker(stream: IO[bytes], secret: bytes | None) -> Callable[[int], bytes]:
    """Returns a function that reads exactly so many bytes of the file as it was before sealing."""
    magic = stream.read(len(SEALED))
    if (magic == SEALED) != (secret is not None):
        raise StoredPrefixError("it is sealed" if magic == SEALED else "it is not sealed")
    if secret is None:
        return _plain_taker(stream, magic)
    return _sealed_taker(stream, secret)


def _plain_taker(stream: IO[bytes], magic: bytes) -> Callable[[int], bytes]:
    ahead = magic

    def take(size: int) -> bytes:
        nonlocal ahead
        data = ahead[:size] + (stream.read(size - len(ahead)) if size > len(ahead) else b"")
        ahead = ahead[size:]
        if len(data) != size:
            raise StoredPrefixError("it is cut short")
        return data

    return take


def _sealed_taker(stream: IO[bytes], secret: bytes) -> Callable[[int], bytes]:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher, prefix, numbers = AESGCM(secret), stream.read(8), itertools.count()
    ahead = b""

    def take(size: int) -> bytes:
        nonlocal ahead
        while len(ahead) < size:
            length = stream.read(4)
            if len(length) != 4 or len(prefix) != 8:
                raise StoredPrefixError("it is cut short")
            (num_bytes,) = struct.unpack("<I", length)
            if num_bytes > MOST_HEADER_BYTES + 8:
                raise StoredPrefixError("a piece of it is too long")
            try:
                nonce = prefix + struct.pack("<I", next(numbers))
                ahead += cipher.decrypt(nonce, stream.read(num_bytes + _TAG_BYTES), None)
            except (InvalidTag, ValueError) as exc:
                raise StoredPrefixError("it is damaged, or of another mesh") from exc
        data, ahead = ahead[:size], ahead[size:]
        return data

    return take
