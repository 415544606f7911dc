"""Two real nodes answer questions about images as transformers' whole model does, also after a stage was killed."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("PIL")

import numpy as np
from PIL import Image

from exo_mesh.engine.registry import load_registry
from tests.meshes.test_continuation import deltas, stream
from tests.support.peers import Peer, mesh, text_of
from tests.support.processes import eventually
from tests.support.vision_models import library_answer, write_vision_model

pytestmark = pytest.mark.skipif(
    "torch" not in load_registry().providers, reason="the torch engine's entry point is not there"
)

FAMILIES = ("llava", "gemma3", "qwen2_5_vl", "qwen3_vl")
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        write_vision_model(root / family, family)
    return root


@pytest.fixture(scope="module")
def pair(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    flags = [["--min-peers", "2", "--models-dir", str(models)]] * 2
    with mesh(tmp_path_factory.mktemp("images"), flags, engine="torch") as peers:
        yield peers


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def of_openai(images: list[Image.Image]) -> list[dict[str, Any]]:
    first, second = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(image)}"}} for image in images
    ]
    texts = [{"type": "text", "text": text} for text in ("Compare ", " with ", " please.")]
    return [texts[0], first, texts[1], second, texts[2]]


QUESTION = "user: Compare {} with {} please.\nassistant:"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_about_images_is_that_of_the_whole_model(pair: list[Peer], models: Path, family: str) -> None:
    images = [picture(1), picture(2, 24, 36)]
    want = library_answer(models / family, family, QUESTION, images, NUM_TOKENS)
    instance = pair[0].place(model=family)
    assert [stage["engine"] for stage in instance["stages"]] == ["torch", "torch"]
    body = {
        "model": family, "messages": [{"role": "user", "content": of_openai(images)}], "temperature": 0,
        "max_tokens": NUM_TOKENS, "ignore_eos": True,
    }  # fmt: skip
    for peer in pair:
        reply = peer.api.post("/v1/chat/completions", body, 60.0)
        assert reply["choices"][0]["message"]["content"] == want


@pytest.mark.extended
@pytest.mark.parametrize(
    "family", ["llava", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gemma3", "qwen3_vl"))]
)
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_stage_changes_nothing_in_an_answer(pair: list[Peer], models: Path, family: str, stage: int) -> None:
    images = [picture(1), picture(2, 24, 36)]
    want = library_answer(models / family, family, QUESTION, images, NUM_TOKENS)
    instance = pair[0].place(model=family)
    victim = next(peer for peer in pair if peer.id == instance["stages"][stage]["peer"])
    body = {
        "model": family, "messages": [{"role": "user", "content": of_openai(images)}], "temperature": 0,
        "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    pieces: list[str] = []
    for event in pair[0].api.stream("/v1/chat/completions", body):
        if event.get("choices") and (text := event["choices"][0]["delta"].get("content")):
            pieces.append(text)
            if len(pieces) == 3:
                pid = instance["stages"][stage]["pid"]
                next(process for process in victim.runners() if process.pid == pid).kill()
    assert "".join(pieces) == want
    assert victim.runners()


@pytest.mark.slow
def test_an_answer_about_images_goes_on_at_another_peer_after_its_entry_peer_was_killed(
    models: Path, tmp_path: Path
) -> None:
    body = {
        "model": "gemma3", "messages": [{"role": "user", "content": of_openai([picture(1), picture(2, 24, 36)])}],
        "temperature": 0, "max_tokens": 150, "ignore_eos": True,
    }  # fmt: skip
    with mesh(tmp_path, [["--models-dir", str(models)]] * 3, engine="torch") as (entry, *others):
        others[0].place(model="gemma3", min_peers=2, exclude_peers=[entry.id])
        whole = text_of(others[0].api.post("/v1/chat/completions", body, 60.0))
        assert eventually(lambda: bool(entry.instances()), 10)
        key, had = {"Idempotency-Key": "a1b2"}, ""
        with stream(entry, {**body, "stream": True}, **key) as response:
            try:
                for _, text in deltas(response):
                    had += text
                    if had and entry.child.alive:
                        os.kill(entry.child.pid, signal.SIGKILL)
            except (HTTPException, ConnectionError):
                pass  # the entry peer has gone
        assert had and whole.startswith(had)
        with stream(others[1], {**body, "stream": True}, **key) as response:
            assert "".join(text for _, text in deltas(response)) == whole
