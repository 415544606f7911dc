"""Reads images from the bodies of requests: data URLs and base64. Pure: nothing is decoded but the base64."""

from __future__ import annotations

import binascii
import re
from typing import Any

from exo_mesh.api.core.neutral_fields import is_empty, refuse_unknown, show_json
from exo_mesh.api.core.request import ImageInput
from exo_mesh.base.long_texts import decode_base64
from exo_mesh.errors import InputError
from exo_mesh.text.image_wire import MAX_SOURCE_BYTES

_DATA_URL = re.compile(r"data:([\w.+/-]*)((?:;[\w=.+-]+)*),", re.ASCII)


def image_of_url(url: Any, where: str) -> ImageInput:
    """The image of a data URL. Raises InputError for any other URL: a node fetches nothing for a client."""
    if not isinstance(url, str):
        raise InputError(f"{where} is {show_json(url)}; it must be a data URL", param=where)
    found = _DATA_URL.match(url[:200])
    if found is None or not found[2].endswith(";base64"):
        message = (
            f"{where} is {show_json(url)}; images are taken only as data URLs in base64 "
            "(data:image/png;base64,...), because a node does not fetch addresses that a request names"
        )
        raise InputError(message, param=where)
    return image_of_base64(url, where, found.end())


IMAGE_PARTS = ("image_url", "input_image")
"""Types of parts with an image in OpenAI's two dialects."""

_PART_FIELDS = {"type", "image_url", "id", "detail", "file_id", "cache_control", "prompt_cache_breakpoint"}


def image_of_part(part: dict[str, Any], where: str) -> ImageInput:
    """The image of a part in OpenAI's dialects. `detail` has no effect: the model's own files say which size an image
    gets. Raises InputError."""
    refuse_unknown(part, _PART_FIELDS, where)
    if not is_empty(part.get("file_id")):
        raise InputError(f"{where}.file_id: this server keeps no files; send a data URL", param=f"{where}.file_id")
    url = part.get("image_url")
    if isinstance(url, dict):
        return image_of_url(url.get("url"), f"{where}.image_url.url")
    return image_of_url(url, f"{where}.image_url")


def image_of_base64(text: Any, where: str, start: int = 0) -> ImageInput:
    """The image of a text in base64 from a character on. Raises InputError."""
    if not isinstance(text, str):
        raise InputError(f"{where} is {show_json(text)}; it must be an image in base64", param=where)
    if len(text) > 2 * MAX_SOURCE_BYTES:
        raise InputError(f"{where} is longer than an image of {MAX_SOURCE_BYTES} bytes in base64", param=where)
    try:
        data = decode_base64(text, start)
    except (binascii.Error, ValueError) as exc:
        raise InputError(f"{where} is not valid base64", param=where) from exc
    if not data:
        raise InputError(f"{where} is empty", param=where)
    return ImageInput(data, where)
