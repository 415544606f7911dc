"""The text of the demo model does not depend on how it is split, and is that of mlx-lm on the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest

from tests.support.peers import ANSWER_S, MODEL, Peer, chat_body, mesh, text_of
from tests.support.processes import eventually
from tests.support.questions import MAX_TOKENS, PREFILL_CHUNK, QUESTIONS, SHORT, Reference, ask

MEMORY_MB = {"big": 1600, "mid": 800, "twin": 800, "small": 400}
SPLITS = {
    # ring, asked for at its first peer: layers at each
    ("big",): (8,),
    ("mid", "twin"): (4, 4),
    ("big", "mid", "twin"): (4, 2, 2),
    ("big", "mid", "twin", "small"): (3, 2, 2, 1),
}


@dataclass(frozen=True)
class Ring:
    layers: dict[str, int]
    """How many a peer holds, by its id, in the order of the ring."""
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
        pytest.param((), id="pair"),
        *(
            pytest.param(names, marks=pytest.mark.extended if len(names) == 4 else pytest.mark.slow, id="+".join(names))
            for names in SPLITS
        ),
    ],
)
def ring(request: pytest.FixtureRequest) -> Iterator[Ring]:
    """The demo model over the pair of this directory, or over the named ones of four peers."""
    names: tuple[str, ...] = request.param
    if not names:
        pair: list[Peer] = request.getfixturevalue("pair")
        yield Ring({stage["peer"]: 4 for stage in pair[0].instances()[0]["stages"]}, pair[0].instances()[0], pair)
        return
    four: dict[str, Peer] = request.getfixturevalue("four")
    first = four[names[0]]
    assert eventually(lambda: all(t["reserved_bytes"] == 0 for t in first.state()["telemetry"].values()))
    others = [peer.id for name, peer in four.items() if name not in names]
    instance = first.place(min_peers=len(names), exclude_peers=others)
    peers = list(four.values())
    assert eventually(lambda: all(len(peer.instances()) == 1 for peer in peers))
    layers = dict(zip((four[name].id for name in names), SPLITS[names], strict=True))
    yield Ring(layers, instance, peers)
    first.api.delete(f"/instance/{instance['id']}", 15)
    assert eventually(lambda: not any(peer.instances() for peer in peers))


def test_layers_are_split_by_memory(ring: Ring) -> None:
    for peer in ring.peers:
        (instance,) = peer.instances()
        held = {stage["peer"]: stage["layers"] for stage in instance["stages"]}
        assert {peer_id: stop - start for peer_id, (start, stop) in held.items()} == ring.layers
        assert [layer for start, stop in held.values() for layer in range(start, stop)] == list(range(8))
        assert all(stage["engine"] == "mlx" for stage in instance["stages"])


LONG = pytest.param(("long",), id="long", marks=pytest.mark.slow)


@pytest.mark.parametrize("names", [pytest.param(SHORT, id="short"), LONG])
def test_greedy_tokens_are_those_of_mlx_lm(ring: Ring, whole: Reference, names: tuple[str, ...]) -> None:
    for name, peer in zip(names, cycle(ring.peers)):
        messages, right = QUESTIONS[name]
        answer = ask(peer, messages)
        expected = whole[name]
        assert (name, answer.prompt_tokens, answer.text) == (name, expected.prompt_tokens, expected.text)
        assert (name, answer.tokens) == (name, expected.tokens)
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert right is None or answer.text == right


@pytest.mark.extended
def test_the_long_question_takes_several_prefill_chunks(whole: Reference) -> None:
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


AT_ONCE = ("count up", "repeat", "system")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(AT_ONCE, id="short"),
        pytest.param((*AT_ONCE, "long"), id="beside a long one", marks=pytest.mark.slow),
    ],
)
def test_requests_at_once_get_the_text_that_they_get_alone(
    ring: Ring, whole: Reference, names: tuple[str, ...]
) -> None:
    bodies = [chat_body(QUESTIONS[name][0], max_tokens=MAX_TOKENS) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        asked = [
            pool.submit(peer.api.post, "/v1/chat/completions", body, ANSWER_S)
            for body, peer in zip(bodies, cycle(ring.peers))
        ]
        replies = [future.result() for future in asked]
    assert [text_of(reply) for reply in replies] == [whole[name].text for name in names]
