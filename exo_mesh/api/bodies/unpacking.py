"""Unpacks the bodies of requests piece by piece, because a small packed body may become a large one. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from exo_mesh.domain.bounded_json import SLICE_BYTES
from exo_mesh.errors import InputError

_GZIP, _ZLIB, _RAW_DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class Unpacker:
    """Unpacks one body. encoding: gzip, x-gzip or deflate."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._unpacker: zlib._Decompress | None = None

    def parts(self, packed: bytes) -> Iterator[bytes]:
        """What the next bytes become, at most SLICE_BYTES at a time. Raises InputError."""
        if self._unpacker is None:
            # some clients send deflate without the zlib header that RFC 9110 requires
            deflate = _ZLIB if packed[0] & 0xF == 8 else _RAW_DEFLATE
            self._unpacker = zlib.decompressobj(deflate if self._encoding == "deflate" else _GZIP)
        try:
            while part := self._unpacker.decompress(packed, SLICE_BYTES):
                yield part
                packed = self._unpacker.unconsumed_tail
        except zlib.error as exc:
            raise InputError(f"the request body is not valid {self._encoding}") from exc
        if self._unpacker.unused_data:
            raise self._wrong_end()

    def end(self) -> None:
        """Raises InputError if the body was not complete."""
        if self._unpacker is not None and not self._unpacker.eof:
            raise self._wrong_end()

    def _wrong_end(self) -> InputError:
        return InputError(
            f"the request body is not valid {self._encoding}: it is cut off, or has extra bytes after its end"
        )
