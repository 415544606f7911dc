"""Packs reasoning into an opaque text, for clients that send a conversation back instead of having it stored. Pure.

The text is compressed and not encrypted: the client that gets it also gets the reasoning itself.
"""

from __future__ import annotations

import base64
import binascii
import zlib

from exo_mesh.base.long_texts import decode_base64

PREFIX = "exo-mesh-1:"
"""Marks texts that were packed here. Others, such as OpenAI's, cannot be read and are left out."""

MAX_CHARS = 4 << 20
"""Longest reasoning that is unpacked; a small text could grow to gigabytes."""


def packed(reasoning: str) -> str:
    """The same reasoning makes the same text."""
    return PREFIX + base64.b64encode(zlib.compress(reasoning.encode("utf-8", "replace"), 6)).decode()


def unpacked(text: str) -> str:
    """The reasoning; "" if the text was not packed here, or is damaged."""
    if not text.startswith(PREFIX):
        return ""
    try:
        data = decode_base64(text, len(PREFIX))
        return zlib.decompressobj().decompress(data, MAX_CHARS).decode("utf-8", "ignore")
    except (binascii.Error, zlib.error, ValueError):
        return ""
