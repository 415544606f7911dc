"""Reads the arguments of tool calls that a model wrote. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

INVALID = "invalid_arguments"
"""The name under which templates and clients get the arguments of a call that are not a JSON object."""


def object_of(arguments: Any) -> dict[str, Any]:
    """The arguments as an object; never fails.

    A model's call may be malformed, or cut by the token limit. Clients send it back with every later request, and the
    conversation must continue. So invalid arguments are shown to the model under the name INVALID.
    """
    decoded = arguments
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return {INVALID: arguments}
    if decoded is None:
        return {}
    return decoded if isinstance(decoded, dict) else {INVALID: arguments}
