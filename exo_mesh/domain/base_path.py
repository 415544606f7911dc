"""Cuts the path of a URL that people give for an OpenAI-compatible server to the part before `/v1`. Pure."""

from __future__ import annotations

import re

_ENDPOINT = re.compile(r"/+(v1(/+(models|chat/completions|completions|responses|embeddings|messages))?/*)?\Z")


def base_path(path: str) -> str:
    """The path without slashes at its end and without a last `/v1`, alone or with a known endpoint behind it.

    Clients want `/v1` in their base URL. A `/v1` in the middle, as in the URLs of some gateways, stays.
    """
    return _ENDPOINT.sub("", path)
