"""/v1/rerank: scores in order, documents in every form, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain.embedding import RERANK, EmbedSpec
from exo_mesh.domain.request import FinishReason, GenerateRequest, TokenEvent
from tests.api.scripted_mesh import ScriptedMesh, Served

DOCUMENTS = ["four", {"text": "twelve chars", "id": 7}, "sixsix"]


async def script(request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
    """The score is the number of tokens."""
    yield TokenEvent(0, None, finish=FinishReason.STOP, vector=struct.pack("<f", len(request.prompt_ids) / 10))


@pytest.fixture
def mesh(model_dir: Path, tmp_path: Path) -> ScriptedMesh:
    shutil.copytree(model_dir, tmp_path / "model")
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    return ScriptedMesh(tmp_path / "model", script=script, tasks=(RERANK,))


async def post(api: Served, body: Any, path: str = "/v1/rerank") -> tuple[int, dict[str, Any]]:
    async with api.http.post(path, json=body) as reply:
        return reply.status, await reply.json()


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_the_best_document_comes_first(api: Served, path: str) -> None:
    status, made = await post(api, {"query": "what", "documents": DOCUMENTS, "model": "exo-mesh-demo"}, path)
    assert (status, [one["index"] for one in made["results"]]) == (200, [1, 2, 0])
    lengths = {request.request_id[-1]: len(request.prompt_ids) for request in api.mesh.requests}
    for result in made["results"]:
        want = 1 / (1 + math.exp(-lengths[str(result["index"])] / 10))
        assert result["relevance_score"] == pytest.approx(want, rel=1e-6) and "document" not in result
    assert api.mesh.request.embed == EmbedSpec("score", normalise=False, whole=True)
    assert made["usage"]["total_tokens"] == sum(lengths.values())


async def test_results_have_their_documents_and_raw_scores_if_asked(api: Served) -> None:
    wish = {"query": "what", "documents": DOCUMENTS, "top_n": 2, "return_documents": True, "raw_scores": True}
    _, made = await post(api, wish)
    assert [one["document"] for one in made["results"]] == [DOCUMENTS[1], {"text": "sixsix"}]
    lengths = {int(request.request_id[-1]): len(request.prompt_ids) for request in api.mesh.requests}
    assert [one["relevance_score"] for one in made["results"]] == pytest.approx([lengths[1] / 10, lengths[2] / 10])


async def test_long_pairs_are_cut_to_the_models_positions_unless_that_is_refused(api: Served) -> None:
    body = {"query": "what", "documents": ["x" * 100]}
    assert (await post(api, body))[0] == 200
    assert len(api.mesh.request.prompt_ids) == 40
    status, made = await post(api, {**body, "truncate": False})
    assert (status, made["error"]["param"]) == (400, "documents[0]")
    assert "at most 40 tokens" in made["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "q", "documents": [{"title": "a"}]}, "documents[0]"),
        ({"query": "q", "documents": ["a"] * 2049}, "documents"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "q", "documents": ["a"], "unknown": 1}, "unknown"),
    ],
)
async def test_bad_input_for_rerank_is_a_400_that_names_the_field(
    api: Served, body: dict[str, Any], param: str
) -> None:
    status, made = await post(api, body)
    assert (status, made["error"]["param"]) == (400, param), made


async def test_a_language_model_does_not_rerank(api: Served) -> None:
    api.mesh.tasks = ("text_generation", "embeddings")
    status, made = await post(api, {"query": "q", "documents": ["a"]})
    assert (status, made["error"]["param"]) == (400, "model")
    assert "cannot rerank documents; it can generate text and make embeddings" in made["error"]["message"]


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{# the roles are system, query and document #}{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture
def judge(mesh: ScriptedMesh) -> ScriptedMesh:
    """The files of a language model that judges."""
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 256}
    (mesh.directory / "config.json").write_text(json.dumps(config))
    steps = [{"type": "sentence_transformers.base.modules.Transformer"}, {"type": "x.logit_score.LogitScore"}]
    (mesh.directory / "modules.json").write_text(json.dumps(steps))
    (mesh.directory / "1_LogitScore.config.json").write_text('{"true_token_id": 9, "false_token_id": 2}')
    text = json.loads((mesh.directory / "tokenizer_config.json").read_text())
    (mesh.directory / "tokenizer_config.json").write_text(json.dumps({**text, "chat_template": TEMPLATE}))
    mesh.limit = 60
    return mesh


async def test_a_language_model_judges_by_its_template(judge: ScriptedMesh, api: Served) -> None:
    body = {"query": "what", "documents": ["yes", "y" * 200], "instruction": "Judge."}
    status, made = await post(api, body)
    assert status == 200, made
    first, second = sorted(api.mesh.requests, key=lambda one: one.request_id)
    assert api.mesh.text.decode(first.prompt_ids) == "<system>Judge.<query>what<document>yes<answer>"
    assert len(second.prompt_ids) <= 60 and api.mesh.text.decode(second.prompt_ids).endswith("y<answer>")
    assert first.embed == EmbedSpec("score", normalise=False, choice=(9, 2))
    status, made = await post(api, {**body, "truncate": False})
    assert (status, made["error"]["param"]) == (400, "documents[1]")


async def test_a_template_without_the_roles_of_a_judge_is_refused(judge: ScriptedMesh, api: Served) -> None:
    (judge.directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    status, made = await post(api, {"query": "q", "documents": ["a"]})
    assert status == 400 and "no chat template with the roles query and document" in made["error"]["message"]


async def test_a_cross_encoder_takes_no_instruction(api: Served) -> None:
    status, made = await post(api, {"query": "q", "documents": ["a"], "instruction": "Judge."})
    assert (status, made["error"]["param"]) == (400, "instruction")
