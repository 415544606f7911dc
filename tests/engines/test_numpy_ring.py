"""Two real nodes with `--engine numpy` serve the demo model, with the greedy text of mlx-lm on the whole model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import cycle
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from exo_mesh.engine.registry import GROUP
from tests.support.peers import ANSWER_S, Peer, chat_body, mesh, text_of
from tests.support.questions import MAX_TOKENS, QUESTIONS, SHORT, Reference, ask

pytestmark = pytest.mark.skipif(
    "numpy" not in {point.name for point in metadata.entry_points(group=GROUP)},
    reason="the installed metadata does not name the numpy engine: install exo-mesh again",
)


def compare(peers: list[Peer], expected: Reference, names: tuple[str, ...]) -> None:
    """Each question alone, at the peers in turn, and then all of them at once."""
    instance = peers[0].place()
    assert {stage["peer"] for stage in instance["stages"]} == {peer.id for peer in peers}
    assert {stage["engine"] for stage in instance["stages"]} == {"numpy"}
    for name, peer in zip(names, cycle(peers)):
        messages, right = QUESTIONS[name]
        answer = ask(peer, messages)
        assert (name, answer.tokens) == (name, expected[name].tokens)
        assert answer.logprobs == pytest.approx(expected[name].logprobs, abs=1e-4)
        assert right is None or answer.text == right
    bodies = [chat_body(QUESTIONS[name][0], max_tokens=MAX_TOKENS) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        asked = [
            pool.submit(peer.api.post, "/v1/chat/completions", body, ANSWER_S)
            for body, peer in zip(bodies, cycle(peers))
        ]
        texts = [text_of(future.result()) for future in asked]
    assert texts == [expected[name].text for name in names]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SHORT, id="short", marks=pytest.mark.extended),
        pytest.param(tuple(QUESTIONS), id="all", marks=pytest.mark.slow),
    ],
)
def test_two_numpy_nodes_give_the_text_of_mlx_lm(tmp_path: Path, whole: Reference, names: tuple[str, ...]) -> None:
    with mesh(tmp_path, [["--min-peers", "2"]] * 2, engine="numpy") as peers:
        compare(peers, whole, names)


@pytest.mark.slow
def test_two_deterministic_nodes_give_the_text_of_mlx_lm(tmp_path: Path, whole: Reference) -> None:
    flags = ["--min-peers", "2", "--engine-option", "mode=deterministic"]
    with mesh(tmp_path, [flags] * 2, engine="numpy") as peers:
        compare(peers, whole, tuple(QUESTIONS))
