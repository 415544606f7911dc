"""Trains a tiny model to make edits: a Qwen3 of 0.8 million weights, from nothing, in a few minutes on two cores.

It sees aider's prompts as they were recorded, each time with other words in them, and learns to answer with the whole
file in which the one word is changed. Each text that stands between the words, and each word, is one token: prompts of
thousands of characters are some fifty tokens. What else is said is bytes.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.clients.aider.recording import FIRST, NEW, SECOND, Talk
from tools.demo_model.batches import Batch, collate
from tools.demo_model.export import model_config, write_json
from tools.demo_model.model import DemoModel, Shape
from tools.demo_model.muon import Muon
from tools.demo_model.tokenizer import END_OF_TEXT, TURN_END, TURN_START, byte_characters
from tools.demo_model.word_lists import ENGLISH

WORDS = tuple(sorted({word.capitalize() for word in ENGLISH if len(word) > 3}))
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BATCH, RATE, STEPS_WARM = 32, 4e-3, 20
ENOUGH = 0.003  # loss at which every word is copied rightly
SHORTEST_PART = 4  # characters; shorter ones stay bytes
PLACES = re.compile(rf"{FIRST}|{SECOND}|{NEW}|(?<=index )[0-9a-f]{{7}}\.\.[0-9a-f]{{7}}")


@dataclass(frozen=True)
class Pieces:
    """A recorded prompt with its answer, cut where the words and the hashes of files stand."""

    before: list[str]
    after: list[str]


def pieces_of(talk: Talk) -> Pieces:
    before = "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in talk.messages)
    after = talk.answer + TURN_END
    return Pieces(_cut(f"{before}{TURN_START}assistant\n"), _cut(after))


def _cut(text: str) -> list[str]:
    """Fixed texts at even places, words and hashes at odd ones."""
    return re.split(f"({PLACES.pattern})", text)


def tokenizer_for(talks: Sequence[Pieces]) -> Tokenizer:
    fixed = [piece for talk in talks for piece in talk.before[::2] + talk.after[::2]]
    parts = {part for piece in fixed for part in re.split(r"<\|im_\w+\|>", piece) if len(part) >= SHORTEST_PART}
    specials = (END_OF_TEXT, TURN_START, TURN_END)
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(byte_characters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in [*sorted(parts), *WORDS]])
    return tokenizer


def example(talk: Pieces, tokenizer: Tokenizer, rng: random.Random) -> tuple[list[int], list[bool]]:
    """Token ids of the prompt and the answer with random words, and which of them the model must predict."""
    words = dict(zip((FIRST, SECOND, NEW), rng.sample(WORDS, 3), strict=True))

    def filled(pieces: list[str]) -> list[int]:
        text = "".join(
            piece if i % 2 == 0 else words.get(piece) or f"{rng.getrandbits(28):07x}..{rng.getrandbits(28):07x}"
            for i, piece in enumerate(pieces)
        )
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    before, after = filled(talk.before), filled(talk.after)
    return before + after, [False] * len(before) + [True] * len(after)


def train(talks: Sequence[Talk], target: Path, limit_s: float, seed: int = 0) -> tuple[float, int]:
    """Write the trained model into `target`; its last loss, and the steps made in at most `limit_s` seconds."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    pieces = [pieces_of(talk) for talk in talks]
    tokenizer = tokenizer_for(pieces)
    shape = Shape(vocab=64 * math.ceil(tokenizer.get_vocab_size() / 64), layers=4)
    model = DemoModel(shape)
    optimisers = optimisers_of(model)
    began, step, loss = time.monotonic(), 0, math.inf
    while loss > ENOUGH and (passed := time.monotonic() - began) < limit_s:
        rate = RATE * min(1.0, (step + 1) / STEPS_WARM, max(0.05, 2 * (1 - passed / limit_s)))
        batch = collate([example(rng.choice(pieces), tokenizer, rng) for _ in range(BATCH)])
        latest = _step(model, optimisers, rate, batch)
        loss = latest if step == 0 else 0.9 * loss + 0.1 * latest
        step += 1
    _export(model, shape, tokenizer, target)
    return loss, step


def optimisers_of(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [Muon(matrices, lr=RATE), torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)]


def _step(model: DemoModel, optimisers: Sequence[torch.optim.Optimizer], rate: float, batch: Batch) -> float:
    ids, places, targets = batch
    loss = F.cross_entropy(model(ids, places), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        optimiser.zero_grad()
    return loss.item()


def _export(model: DemoModel, shape: Shape, tokenizer: Tokenizer, target: Path) -> None:
    target.mkdir(parents=True)
    end, pad = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    write_json(target / "config.json", model_config(shape, end, pad))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TURN_END, "chat_template": TEMPLATE}
    write_json(target / "tokenizer_config.json", config)
    tokenizer.save(str(target / "tokenizer.json"))
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})
