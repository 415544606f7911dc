"""Stages of llama.cpp write the text of llama.cpp's own server, with real weights, from prompts of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.real.real_model import PROMPTS, LlamaServer, greedy, prompt_ids
from tests.support.serving import load_stages

pytest.importorskip("xllamacpp")

pytestmark = pytest.mark.extended

Ids = tuple[int, ...]

CUTS = [(), (15,), (10, 20)]
STAGES = ["1 stage", "2 stages", "3 stages"]
FEW = PROMPTS[::50]
TOKENS = 8


@pytest.fixture(scope="module")
def few(llama_server: LlamaServer) -> list[tuple[Ids, list[int]]]:
    """Some prompts, and what the server writes."""
    return asked(llama_server, FEW)


@pytest.fixture(scope="module")
def many(llama_server: LlamaServer) -> list[tuple[Ids, list[int]]]:
    """All prompts, and what the server writes."""
    return asked(llama_server, PROMPTS)


def asked(llama_server: LlamaServer, questions: Sequence[str]) -> list[tuple[Ids, list[int]]]:
    prompts = [llama_server.prompt(question) for question in questions]
    return [(prompt, llama_server.answer(prompt, TOKENS)[0]) for prompt in prompts]


def check(model_dir: Path, cuts: tuple[int, ...], want: Sequence[tuple[Ids, list[int]]]) -> None:
    stages = load_stages("llamacpp", model_dir, cuts, {"threads": "1"})
    assert greedy(stages, [prompt for prompt, _ in want], TOKENS) == [tokens for _, tokens in want]
    for stage in stages:
        stage.close()


def test_a_prompt_has_the_ids_of_llama_cpps_own_tokenizer(llama_server: LlamaServer, tokenizer: Tokenizer) -> None:
    assert len(set(PROMPTS)) == 200
    for question in PROMPTS:
        assert prompt_ids(tokenizer, question) == llama_server.prompt(question), question


def test_stages_write_what_the_server_writes(model_dir: Path, few: list[tuple[Ids, list[int]]]) -> None:
    check(model_dir, (15,), few)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 90 s of CPU for the server, and 110 for each ring
@pytest.mark.parametrize("cuts", CUTS, ids=STAGES)
def test_stages_write_what_the_server_writes_after_200_prompts(
    model_dir: Path, cuts: tuple[int, ...], many: list[tuple[Ids, list[int]]]
) -> None:
    check(model_dir, cuts, many)
