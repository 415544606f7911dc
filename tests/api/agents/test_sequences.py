"""Conversations of coding agents, in the form that each of them sends (see sequences/README.md): the mesh answers
right, calls the tools, and each prompt begins with nearly all of the one before, so that a prefix cache can reuse it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import exo_mesh.weights
from exo_mesh.api.context import ApiOptions
from exo_mesh.domain.request import GenerateRequest, Progress, TokenEvent
from tests.api.agents.replay import FOLDER, Replay, sequence
from tests.api.conftest import OPEN_ADMIN
from tests.api.openai.test_tools import TEMPLATE
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.text.text_models import write_text_model

AGENTS = sorted(path.stem for path in FOLDER.glob("*.json"))
LEAST_SHARE = 0.95
ENDS = {"calls": {"tool_use", "tool_calls", "completed"}, "text": {"end_turn", "stop", "completed"}}


def shared(first: tuple[int, ...], second: tuple[int, ...]) -> float:
    """The share of the first prompt with which the second one begins."""
    same = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second))
    return min(same, len(first)) / len(first)


def decoded(mesh: ScriptedMesh, request: GenerateRequest) -> str:
    """The prompt of a request as text."""
    return str(mesh.text.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False))


@pytest.fixture(scope="module", params=["demo", "qwen-like"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tools: the shipped one, and one with the template of another family."""
    if request.param == "demo":
        return Path(exo_mesh.weights.__path__[0]) / "shipped" / "exo-mesh-demo"
    return write_text_model(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agents_conversation_is_answered_and_each_prompt_extends_the_last(agent: str, model: Path) -> None:
    recorded = sequence(agent)
    mesh = ScriptedMesh(model, limit=200_000)
    writes: list[str] = []

    async def answers(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        begins_in_thought = decoded(mesh, request).rstrip().endswith("<think>")
        text = f"I think.\n</think>\n\n{writes[-1]}" if begins_in_thought else writes[-1]
        for event in mesh.events(mesh.text.encode_text(text), request):
            yield event

    mesh.script = answers
    async with served(mesh, ApiOptions(access=OPEN_ADMIN)) as api:
        replay = Replay(api.http, recorded)
        for turn in recorded["turns"]:
            writes.append(turn["model_writes"])
            reply = await replay.send(turn)
            assert reply.says.strip() == turn["says"]
            assert reply.calls == [(name, arguments) for name, arguments in turn["calls"]]
            assert reply.end in ENDS["calls" if turn["calls"] else "text"] and len(set(reply.ids)) == len(turn["calls"])
            assert reply.num_prompt == len(mesh.request.prompt_ids)
    prompts = [tuple(request.prompt_ids) for request in mesh.requests]
    shares = [shared(*pair) for pair in pairwise(prompts)]
    print(f"{agent}: {[len(prompt) for prompt in prompts]} tokens, shares {[round(share, 4) for share in shares]}")
    assert len(prompts) == len(recorded["turns"]) >= 5 and min(shares) >= LEAST_SHARE
    assert_results_reached_the_model(mesh, recorded)


def assert_results_reached_the_model(mesh: ScriptedMesh, recorded: dict[str, Any]) -> None:
    """The last prompt has the output of the tests and the source in it."""
    prompt = decoded(mesh, mesh.request)
    assert "ZeroDivisionError: division by zero" in prompt and "2 passed in 0.01s" in prompt, recorded["agent"]
    assert "return max(values) - min(values)" in prompt and "What does spread() do?" in prompt


def test_a_changed_beginning_is_no_shared_prefix() -> None:
    assert shared((1, 2, 3, 4), (1, 2, 3, 4, 5)) == 1
    assert shared((1, 2, 3, 4), (1, 9, 3, 4, 5)) == 0.25
    assert shared((1, 2, 3, 4), (1, 2)) == 0.5
