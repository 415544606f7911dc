"""Every error code in every dialect: what clients may send again, and whose fault it is."""

from __future__ import annotations

import pytest

from exo_mesh.api.anthropic.failures import ANTHROPIC_ERRORS
from exo_mesh.api.errors import _RULES, FAILURE, error_response
from exo_mesh.api.ollama.lines import OLLAMA_ERRORS
from exo_mesh.errors import error_from_code

PASSING = {
    "bodies_wait", "canary_failed", "crash_loop", "fetch_failed", "memory_pressure", "node_stopping", "not_ready",
    "overloaded", "peer_version", "pending", "quarantined", "rank_lost", "reservation_refused", "stage_lost",
    "transport_error",
}  # fmt: skip
"""The codes of failures that pass by themselves."""

NOBODYS_FAULT = {"instance_deleted", "no_placement"}
"""Refusals with a status below 500 that no other request would avoid."""


@pytest.mark.parametrize("code", sorted(_RULES))
def test_every_code_has_one_class_in_every_dialect(code: str) -> None:
    reply = error_response(error_from_code(code, "words"))
    failure = reply[FAILURE]
    spoken = ANTHROPIC_ERRORS.body(failure, "req_1").error
    assert reply.status == failure.status == _RULES[code].status
    assert (failure.openai_body()["error"]["code"], OLLAMA_ERRORS.body(failure, "req_1").error) == (code, "words")
    is_server = reply.status >= 500
    assert is_server == (failure.kind == "server_error")
    if is_server or code in NOBODYS_FAULT:
        assert spoken.type in ("api_error", "overloaded_error", "timeout_error")
    # the official clients of OpenAI and Anthropic repeat 408, 409, 429 and 5xx by themselves
    assert (reply.headers.get("Retry-After") is not None) == (code in PASSING)
    if code in PASSING:
        assert reply.status in (429, 503) and spoken.type in ("rate_limit_error", "overloaded_error")
