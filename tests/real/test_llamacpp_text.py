"""Stages of llama.cpp write the text of llama.cpp's own server, with real weights, from prompts of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.real.real_model import PROMPTS, LlamaServer, greedy, prompt_ids
from tests.support.serving import load_stages

pytest.importorskip("xllamacpp")

pytestmark = pytest.mark.extended

CUTS = [(), (15,), (10, 20)]
FEW = PROMPTS[::25]


def test_a_prompt_has_the_ids_of_llama_cpps_own_tokenizer(llama_server: LlamaServer, tokenizer: Tokenizer) -> None:
    assert len(set(PROMPTS)) == 200
    for question in PROMPTS:
        assert prompt_ids(tokenizer, question) == llama_server.prompt(question), question


@pytest.mark.parametrize("cuts", CUTS, ids=["1 stage", "2 stages", "3 stages"])
def test_stages_write_what_the_server_writes(llama_server: LlamaServer, model_dir: Path, cuts: tuple[int, ...]) -> None:
    prompts = [llama_server.prompt(question) for question in FEW]
    want = [llama_server.tokens(prompt, 8) for prompt in prompts]
    stages = load_stages("llamacpp", model_dir, cuts, {"threads": "1"})
    assert greedy(stages, prompts, 8) == want
    for stage in stages:
        stage.close()
