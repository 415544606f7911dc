"""Expected answers and drafts: what reaches the ring, and what a client reads of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.scripted_mesh import Served


@pytest.mark.parametrize(
    "content", ["It is 14:02", [{"type": "text", "text": "It is "}, {"type": "text", "text": "14:02"}]]
)
async def test_an_expected_answer_reaches_the_ring_as_tokens(api: Served, content: Any) -> None:
    status, _ = await api.chat(prediction={"type": "content", "content": content})
    request = api.mesh.requests[-1]
    assert status == 200 and request.drafts
    assert list(request.expected_ids) == api.mesh.text.encode_prompt("It is 14:02")


async def test_a_request_can_do_without_drafts(api: Served) -> None:
    status, _ = await api.chat(prediction={"type": "content", "content": "x"}, speculation={"type": "off"})
    assert status == 200 and not api.mesh.requests[-1].drafts and not api.mesh.requests[-1].expected_ids
    await api.chat(speculation={"type": "auto"})
    assert api.mesh.requests[-1].drafts


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prediction": "x"}, "prediction"),
        ({"prediction": {"type": "content"}}, "content"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction"),
        ({"speculation": {"type": "mtp"}}, "speculation"),
    ],
)
async def test_a_wrong_form_is_refused_by_name(api: Served, fields: dict[str, Any], named: str) -> None:
    status, body = await api.chat(**fields)
    assert status == 400 and named in body["error"]["message"]


async def test_usage_counts_drafts(api: Served) -> None:
    _, body = await api.chat()
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
