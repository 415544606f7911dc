"""The text of the demo model does not depend on how it is split, and is that of mlx-lm on the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import byte_alphabet
from tests.support.peers import ANSWER_S, MODEL, Peer, chat_body, mesh, text_of
from tests.support.processes import eventually

MEMORY_MB = {"big": 1600, "mid": 800, "twin": 800, "small": 400}
SPLITS = {
    # ring, asked for at its first peer: layers at each
    ("big",): (8,),
    ("mid", "twin"): (4, 4),
    ("big", "mid", "twin"): (4, 2, 2),
    ("big", "mid", "twin", "small"): (3, 2, 2, 1),
}

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
PREFILL_CHUNK = 512
MAX_TOKENS = 40


@dataclass(frozen=True)
class Answer:
    """tokens: the bytes of each output token. logprobs: of each of them."""

    prompt_tokens: int
    text: str
    tokens: list[bytes]
    logprobs: list[float]


@dataclass(frozen=True)
class Ring:
    names: tuple[str, ...]
    instance: dict[str, Any]
    peers: list[Peer]
    """All peers of the mesh, also those that hold no layer."""


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Peer]]:
    flags = [["--max-memory", f"{size}MB"] for size in MEMORY_MB.values()]
    with mesh(tmp_path_factory.mktemp("four"), flags) as peers:
        yield dict(zip(MEMORY_MB, peers, strict=True))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(names, marks=pytest.mark.slow if len(names) == 3 else (), id="+".join(names)) for names in SPLITS
    ],
)
def ring(request: pytest.FixtureRequest, four: dict[str, Peer]) -> Iterator[Ring]:
    """The demo model over the named peers only."""
    names: tuple[str, ...] = request.param
    first = four[names[0]]
    assert eventually(lambda: all(t["reserved_bytes"] == 0 for t in first.state()["telemetry"].values()))
    others = [peer.id for name, peer in four.items() if name not in names]
    instance = first.place(min_peers=len(names), exclude_peers=others)
    peers = list(four.values())
    assert eventually(lambda: all(len(peer.instances()) == 1 for peer in peers))
    yield Ring(names, instance, peers)
    first.api.delete(f"/instance/{instance['id']}", 15)
    assert eventually(lambda: not any(peer.instances() for peer in peers))


@pytest.fixture(scope="module")
def whole() -> dict[str, Answer]:
    """What mlx-lm itself generates greedily from the same conversations."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load

    model, tokenizer = load(str(shipped()))[:2]
    answers = {}
    for name, (messages, _) in QUESTIONS.items():
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        ids: list[int] = []
        logprobs: list[float] = []
        for token, step in generate_step(
            mx.array(prompt), model, max_tokens=MAX_TOKENS, prefill_step_size=PREFILL_CHUNK
        ):
            if int(token) in tokenizer.eos_token_ids:
                break
            ids.append(int(token))
            logprobs.append(step[int(token)].item())
        answers[name] = Answer(len(prompt), tokenizer.decode(ids), [token_bytes(tokenizer, i) for i in ids], logprobs)
    return answers


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


def test_layers_are_split_by_memory(ring: Ring, four: dict[str, Peer]) -> None:
    for peer in ring.peers:
        (instance,) = peer.instances()
        held = {stage["peer"]: stage["layers"] for stage in instance["stages"]}
        assert [held[four[name].id][1] - held[four[name].id][0] for name in ring.names] == list(SPLITS[ring.names])
        assert [layer for start, stop in held.values() for layer in range(start, stop)] == list(range(8))
        assert all(stage["engine"] == "mlx" for stage in instance["stages"])


def test_greedy_tokens_are_those_of_mlx_lm(ring: Ring, whole: dict[str, Answer]) -> None:
    for (name, (messages, right)), peer in zip(QUESTIONS.items(), cycle(ring.peers)):
        answer = ask(peer, messages)
        expected = whole[name]
        assert (name, answer.prompt_tokens, answer.text) == (name, expected.prompt_tokens, expected.text)
        assert (name, answer.tokens) == (name, expected.tokens)
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert right is None or answer.text == right


def test_the_long_question_takes_several_prefill_chunks(whole: dict[str, Answer]) -> None:
    assert whole["long"].prompt_tokens > 2 * PREFILL_CHUNK


FLAT = {"model": MODEL, "prompt": "Zq", "temperature": 1, "frequency_penalty": 1, "max_tokens": 16, "ignore_eos": True}
"""A prompt unlike any that the model was trained on: many tokens are likely, so seeds matter."""


def test_a_seed_gives_one_text_whatever_the_split(ring: Ring, sampled: dict[int, str]) -> None:
    def ask_flat(peer: Peer, seed: int) -> str:
        return str(peer.api.post("/v1/completions", {**FLAT, "seed": seed}, ANSWER_S)["choices"][0]["text"])

    texts = {seed: ask_flat(peer, seed) for seed, peer in zip((1, 2, 3), cycle(ring.peers))}
    assert len(set(texts.values())) == 3
    assert ask_flat(ring.peers[-1], 1) == texts[1]
    assert {seed: sampled.setdefault(seed, text) for seed, text in texts.items()} == texts


@pytest.fixture(scope="module")
def sampled() -> dict[int, str]:
    """Text by seed, of the first split that was asked."""
    return {}


def test_requests_at_once_get_the_text_that_they_get_alone(ring: Ring, whole: dict[str, Answer]) -> None:
    names = ["count up", "repeat", "long", "system"]
    bodies = [chat_body(QUESTIONS[name][0], max_tokens=MAX_TOKENS) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        asked = [
            pool.submit(peer.api.post, "/v1/chat/completions", body, ANSWER_S)
            for body, peer in zip(bodies, cycle(ring.peers))
        ]
        replies = [future.result() for future in asked]
    assert [text_of(reply) for reply in replies] == [whole[name].text for name in names]
