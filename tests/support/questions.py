"""Questions to the demo model, and what mlx-lm itself answers greedily with the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tests.support.checkpoints import byte_alphabet
from tests.support.peers import MODEL, Peer, text_of

Messages = list[dict[str, str]]


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


SYSTEM = {"role": "system", "content": "You are a friendly assistant."}
QUESTIONS: dict[str, tuple[Messages, str | None]] = {
    "count up": (user("Count from 7 to 14."), ", ".join(map(str, range(7, 15)))),
    "count down": (user("Count from 31 down to 24."), ", ".join(map(str, range(31, 23, -1)))),
    "spell": (user("Spell robot."), "r-o-b-o-t"),
    "add": (user("What is 23 + 45?"), "23 + 45 = 68"),
    "repeat": (user("Repeat: Grüße aus Köln 🚀"), "Grüße aus Köln 🚀"),
    "system": ([SYSTEM, *user("Count from 98 to 103.")], ", ".join(map(str, range(98, 104)))),
    # several prefill chunks; the model was not trained on prompts so long, so there is no right answer
    "long": ([SYSTEM, *user("Say again: 1, 2, 3! " * 90 + "What is a mesh?")], None),
}
SHORT = tuple(name for name in QUESTIONS if name != "long")
"""MLX takes seconds on a CPU to read the long question."""

PREFILL_CHUNK = 512
MAX_TOKENS = 40


@dataclass(frozen=True)
class Answer:
    """tokens: the bytes of each output token. logprobs: of each of them."""

    prompt_tokens: int
    text: str
    tokens: list[bytes]
    logprobs: list[float]


class Reference:
    """What mlx-lm generates greedily from each of the QUESTIONS; computed when an answer is first asked for."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        self._loaded: Any = None

    def __getitem__(self, name: str) -> Answer:
        if name not in self._answers:
            self._answers[name] = self._generate(QUESTIONS[name][0])
        return self._answers[name]

    def _generate(self, messages: Messages) -> Answer:
        import mlx.core as mx
        from mlx_lm.generate import generate_step
        from mlx_lm.utils import load

        self._loaded = self._loaded or load(str(shipped()))[:2]
        model, tokenizer = self._loaded
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)
        ids: list[int] = []
        logprobs: list[float] = []
        for token, step in generate_step(
            mx.array(prompt), model, max_tokens=MAX_TOKENS, prefill_step_size=PREFILL_CHUNK
        ):
            if int(token) in tokenizer.eos_token_ids:
                break
            ids.append(int(token))
            logprobs.append(step[int(token)].item())
        return Answer(len(prompt), tokenizer.decode(ids), [token_bytes(tokenizer, i) for i in ids], logprobs)


def shipped() -> Path:
    return Path(str(resources.files("exo_mesh.weights") / "shipped" / MODEL))


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """By the table of byte-level tokenizers, so that parts of characters are seen too."""
    alphabet = byte_alphabet()
    return bytes(alphabet.index(character) for character in tokenizer.convert_ids_to_tokens(token_id))


def ask(peer: Peer, messages: Messages, **fields: Any) -> Answer:
    reply = peer.chat(messages, logprobs=True, max_tokens=MAX_TOKENS, **fields)
    tokens = reply["choices"][0]["logprobs"]["content"]
    return Answer(
        reply["usage"]["prompt_tokens"],
        text_of(reply),
        [bytes(token["bytes"]) for token in tokens],
        [token["logprob"] for token in tokens],
    )
