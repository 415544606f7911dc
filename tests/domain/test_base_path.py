"""Of the URL of a server people give the part before /v1, /v1 itself, or an endpoint below it."""

from __future__ import annotations

import pytest

from exo_mesh.domain.addresses import base_path

ENDINGS = ("", "/", "//", "/v1", "/v1/", "//v1//", "/v1/models", "/v1/chat/completions", "/v1/completions/")
ENDINGS += ("/v1/responses", "/v1/embeddings", "/v1/messages")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("base", ["", "/llm", "/v1/account/gateway/openai", "/v1x", "/mesh/v1/models/some"])
def test_only_the_last_v1_with_a_known_endpoint_is_cut(base: str, ending: str) -> None:
    assert base_path(base + ending) == base
