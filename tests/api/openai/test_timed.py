"""`/bench/chat/completions` and `/bench/completions`: the usual answer, and where its time went."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.scripted_mesh import Served
from tests.api.test_ops import get

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "seed": 1}
BARE: dict[str, Any] = {"prompt": "Hi", "seed": 1}


@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", BARE)])
async def test_the_answer_is_the_usual_one_and_its_parts_add_up(api: Served, path: str, body: dict[str, Any]) -> None:
    _, usual = await get(api, f"/v1/{path}", "POST", json=body)
    status, timed = await get(api, f"/bench/{path}", "POST", json=body)
    assert status == 200 and timed["choices"] == usual["choices"] and timed["usage"] == usual["usage"]
    bench = timed.pop("bench")
    assert timed.keys() == usual.keys()
    assert sum(bench["parts"].values()) == pytest.approx(bench["total_s"], abs=2e-5)
    assert bench["parts"]["tokenizer_s"] > 0
    assert (bench["parts"]["template_s"] > 0) == (path == "chat/completions")


async def test_it_is_traced_although_the_client_does_not_ask_for_it(api: Served) -> None:
    _, timed = await get(api, "/bench/chat/completions", "POST", json=CHAT)
    assert (await get(api, f"/v1/traces/{timed['bench']['trace_id']}"))[0] == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"stream": True}, "stream"),
        ("chat/completions", {"n": 2}, "n"),
        ("completions", {"best_of": 2}, "best_of"),
        ("completions", {"prompt": ["a", "b"]}, "prompt"),
        ("chat/completions", {"temperature": 9}, "temperature"),
        ("chat/completions", {"max_tokns": 1}, "max_tokns"),
        ("completions", {"model": "nobody-has-it"}, "model"),
    ],
)
async def test_what_cannot_be_timed_or_is_wrong_is_refused(
    api: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    body = CHAT if path.startswith("chat") else BARE
    status, refused = await get(api, f"/bench/{path}", "POST", json={**body, **fields})
    assert status in (400, 404) and refused["error"]["param"] == param
