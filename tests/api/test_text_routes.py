"""Text to tokens, tokens to text, conversations to prompts: the shapes of llama.cpp, vLLM and exo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.scripted_mesh import Served

CHAT = {"messages": [{"role": "user", "content": "Hi there"}]}


async def post(api: Served, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    async with api.http.post(path, json=body) as reply:
        return reply.status, await reply.json()


async def test_llama_cpp_reads_tokens_and_gets_its_text_back(api: Served) -> None:
    status, made = await post(api, "/tokenize", {"content": "Grüße, 🦎!"})
    assert status == 200 and made["tokens"] == api.mesh.text.encode_prompt("Grüße, 🦎!")
    status, back = await post(api, "/detokenize", {"tokens": made["tokens"]})
    assert (status, back["content"]) == (200, "Grüße, 🦎!")
    _, pieces = await post(api, "/tokenize", {"content": "Grüße, 🦎!", "with_pieces": True})
    assert [piece["id"] for piece in pieces["tokens"]] == made["tokens"]
    own = b"".join(bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces["tokens"])
    assert own.decode() == "Grüße, 🦎!"


async def test_vllm_reads_count_limit_and_strings(api: Served) -> None:
    body = {"model": "exo-mesh-demo", "prompt": "Hello", "return_token_strs": True}
    status, made = await post(api, "/tokenize", body)
    ids = api.mesh.text.encode_text("Hello")
    assert (status, made["tokens"], made["count"], made["max_model_len"]) == (200, ids, len(ids), api.mesh.limit)
    assert made["token_strs"] == [api.mesh.text.tokenizer.id_to_token(one) for one in ids]
    assert (await post(api, "/detokenize", {"tokens": ids}))[1]["prompt"].endswith("Hello")


async def test_a_chat_has_the_prompt_and_the_tokens_that_its_answer_begins_from(api: Served) -> None:
    await api.chat(**CHAT)
    sent = list(api.mesh.request.prompt_ids)
    status, encoded = await post(api, "/v1/chat/token/encode", CHAT)
    assert (status, encoded["encoded_tokens"], encoded["num_tokens"]) == (200, sent, len(sent))
    assert encoded["length"] == len(encoded["encoded_prompt"])
    assert (await post(api, "/apply-template", CHAT))[1] == {"prompt": encoded["encoded_prompt"]}
    assert (await post(api, "/tokenize", CHAT))[1]["tokens"] == sent


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "content"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        ("/tokenize", {"content": "a" * 800_000}, "content"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [0] * 140_000}, "tokens"),
        ("/apply-template", {"messages": [{"role": "tool", "content": 3}]}, "messages[0].content"),
    ],
)
async def test_what_cannot_be_used_is_named(api: Served, path: str, body: Any, param: str) -> None:
    status, said = await post(api, path, body)
    assert (status, said["error"]["param"]) == (400, param), said
