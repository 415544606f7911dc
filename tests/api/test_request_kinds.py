"""The request log names each request by what it is for, whichever client's route it came by."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.domain.embedding import EMBEDDINGS, RERANK
from exo_mesh.domain.request import FinishReason, GenerateRequest, TokenEvent
from exo_mesh.rings.serving.history import kind_of
from tests.api.conftest import OPEN_ADMIN
from tests.api.scripted_mesh import ScriptedMesh, Served, served

MESSAGES = [{"role": "user", "content": "Hi"}]


async def vector(request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
    yield TokenEvent(0, None, finish=FinishReason.STOP, vector=struct.pack("<f", 1.0))


async def kind(api: Served, path: str, body: dict[str, Any]) -> str:
    """The kind of the request that a call makes."""
    async with api.http.post(path, json={"model": "exo-mesh-demo", **body}) as reply:
        assert reply.status == 200, await reply.text()
    return kind_of(api.mesh.request.request_id)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, "chat"),
        ("/v1/responses", {"input": "Hi"}, "chat"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}, "chat"),
        ("/api/chat", {"messages": MESSAGES}, "chat"),
        ("/v1/completions", {"prompt": "Hi"}, "completion"),
        ("/api/generate", {"prompt": "Hi"}, "completion"),
    ],
)
async def test_a_request_for_text_is_a_chat_or_a_completion(
    api: Served, path: str, body: dict[str, Any], expected: str
) -> None:
    assert await kind(api, path, body) == expected


async def test_a_call_for_vectors_or_scores_is_named_so(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    mesh = ScriptedMesh(tmp_path / "model", script=vector, tasks=(EMBEDDINGS, RERANK))
    async with served(mesh, ApiOptions(access=OPEN_ADMIN)) as api:
        assert await kind(api, "/v1/embeddings", {"input": "Hi"}) == "embedding"
        assert await kind(api, "/api/embed", {"input": "Hi"}) == "embedding"
        assert await kind(api, "/api/embeddings", {"prompt": "Hi"}) == "embedding"
        assert await kind(api, "/v1/rerank", {"query": "Hi", "documents": ["Hi"]}) == "rerank"
