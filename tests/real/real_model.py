"""What the tests of a real model ask: prompts, llama.cpp's own server, and rings of several engines."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageEngine
from tests.support.serving import ServingRing
from tools.real_model import LAYERS

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the model's template says where a conversation has no system message."""

UNHURRIED = {"prefill_budget_s": 1e6, "prefill_alone_s": 1e6}
"""Limits of a driver that does not shorten the chunks of a prompt on a slow machine."""

END_IDS = (0, 2)
"""The ids that end an answer."""

_FORMS = (
    "What is {}?",
    "Write a short poem about {}.",
    "Explain {} to a child of six.",
    "List three facts about {}.",
    "Translate into French: {}",
    "Is {} older than the moon? Answer yes or no.",
    'Repeat this exactly: "{}"',
    "Write a Python function that prints {}",
    "{}\n\nSummarise the line above in one word.",
    "Count from {} to ten.",
)
_SUBJECTS = (
    "the capital of France", "photosynthesis", "3 + 4 * 12", "the sea", "  two   spaces  ", "東京タワー", "naïve café",
    "a 🐙 with eight arms", "x² + y² = z²", "<b>bold</b> & <i>it</i>", "def f(x):\n    return x", "don't, can't, won't",
    "1,234,567.89", "Привет, мир", "{\"key\": [1, null]}", "SELECT * FROM t;", "https://example.org/?q=1#top",
    "the 2nd law of thermodynamics", "\tTABS\tand\nnewlines", "antidisestablishmentarianism",
)  # fmt: skip
PROMPTS = tuple(form.format(subject) for subject, form in itertools.product(_SUBJECTS, _FORMS))
"""200 questions: prose, numbers, code, markup, white space, and letters of five scripts."""


def prompt_ids(tokenizer: Tokenizer, question: str) -> tuple[int, ...]:
    """The ids of a conversation that begins with the question, as the model's template writes it."""
    turns = "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in (("system", SYSTEM), ("user", question))
    )
    return tuple(tokenizer.encode(f"{turns}<|im_start|>assistant\n", add_special_tokens=False).ids)


def load_ring(
    model_dir: Path, parts: Sequence[str], cuts: Sequence[int], options: Mapping[str, Mapping[str, str]]
) -> list[StageEngine]:
    """A stage of each engine in `parts`, cut before these layers. They hand float32 on."""
    stages: list[StageEngine] = []
    for engine, start, stop in zip(parts, (0, *cuts), (*cuts, LAYERS), strict=True):
        stage: StageEngine = import_module(f"exo_mesh_{engine}").provider.create()
        shard = Shard("model", start, stop, LAYERS)
        stage.load(LoadRequest(shard, model_dir, 4096, options.get(engine, {}), "float32"), lambda done, total: None)
        stages.append(stage)
    return stages


@dataclass(frozen=True)
class LlamaServer:
    """Calls llama.cpp's own server."""

    url: str

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)

    def prompt(self, question: str) -> tuple[int, ...]:
        """The ids of a conversation that begins with the question, by the server's own template and tokenizer."""
        messages = [{"role": "user", "content": question}]
        text = self.post("/apply-template", {"messages": messages})["prompt"]
        return tuple(self.post("/tokenize", {"content": text, "parse_special": True})["tokens"])

    def answer(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], str]:
        """The likeliest next ids, without the one that ends the text, and their text.

        The whole prompt is computed, as in a ring that has not seen it: llama.cpp computes a row that is alone by other
        kernels than several, and 8-bit activations turn a last bit into a step, seldom but then at any token.
        """
        body = {"temperature": 0, "id_slot": 0, "cache_prompt": False, "return_tokens": True}
        found = self.post("/completion", {**body, "prompt": list(prompt), "n_predict": num_tokens})
        assert found["timings"]["prompt_n"] == len(prompt)
        return without_end(found["tokens"]), str(found["content"])


def without_end(tokens: Iterable[int]) -> list[int]:
    """The ids before the first one that ends an answer."""
    return list(itertools.takewhile(lambda token: token not in END_IDS, tokens))


def greedy(stages: Sequence[StageEngine], prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The likeliest next ids after each prompt up to one of END_IDS, from a ring of the real driver over the stages.

    One prompt after the other, so that every row but those of prompts is alone; and each by a new driver, which has not
    yet learned by what chunks this machine computes prompts.
    """
    found: list[list[int]] = []
    for prompt in prompts:
        ring = ServingRing(stages)
        asked = ring.submit(tuple(prompt), num_tokens)
        ring.run()
        assert not asked.answers.error
        found.append(without_end(asked.answers.tokens))
    return found
