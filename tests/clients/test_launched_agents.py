"""The coding agents themselves, unmodified, started by `exo-mesh launch` against the API over a scripted model.

CLAUDE_CODE, CODEX, OPENCODE, QWEN_CODE, CONTINUE and AIDER name the programs (docs/tasks/clients.md says how to install
them). The answers of the model are written here: most agents send 10,000 tokens and more, which no model of the test
machines can read.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.cli.verbs.launch.agents import AGENTS
from exo_mesh.domain.request import GenerateRequest, Progress, TokenEvent
from tests.api.agents.test_sequences import LEAST_SHARE, decoded, shared
from tests.api.openai.test_tools import TEMPLATE
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.text.text_models import write_text_model

LIMIT_S = 100
ANSWER = "The tool has answered."


@dataclass(frozen=True)
class Tried:
    """One agent. tool, arguments: its shell, and a command for it; "" for an agent without tools. words: what asks it
    one question without a person."""

    name: str
    variable: str
    tool: str
    arguments: dict[str, object]
    words: tuple[str, ...]


ECHO = "echo from-a-tool"
TRIED = [
    Tried(
        "claude",
        "CLAUDE_CODE",
        "Bash",
        {"command": ECHO, "description": "say"},
        ("-p", "Go.", "--allowedTools", "Bash"),
    ),
    Tried("codex", "CODEX", "exec_command", {"cmd": ECHO}, ("exec", "--skip-git-repo-check", "Go.")),
    Tried("opencode", "OPENCODE", "bash", {"command": ECHO, "description": "say"}, ("run", "Go.")),
    Tried("qwen", "QWEN_CODE", "run_shell_command", {"command": ECHO, "is_background": False}, ("--yolo", "-p", "Go.")),
    Tried("continue", "CONTINUE", "Bash", {"command": ECHO}, ("-p", "--auto", "Go.")),
    Tried("aider", "AIDER", "", {}, ("--no-git", "--yes-always", "--no-check-update", "--message", "Go.")),
]

pytestmark = pytest.mark.extended


def links(folder: Path, tried: Tried) -> str:
    """A PATH on which the agent has its usual name."""
    program = os.environ.get(tried.variable)
    if program is None:
        pytest.skip(f"{tried.variable} is not set: the program of {tried.name} is needed")
    folder.mkdir(exist_ok=True)
    link = folder / AGENTS[tried.name].program
    link.unlink(missing_ok=True)
    link.symlink_to(Path(program).resolve())
    return f"{folder}:{os.environ['PATH']}"


async def launch(tried: Tried, url: str, root: Path) -> tuple[int, str]:
    """(exit code, all that is printed) of one launched agent, in an empty project and home."""
    for name in ("home", "project"):
        (root / name).mkdir(exist_ok=True)
    environ = {name: os.environ[name] for name in ("LANG", "PYTHONPATH") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "exo_mesh.cli.main", "launch", tried.name, "--api-url", url, "--", *tried.words),
        cwd=root / "project",
        env={**environ, "HOME": str(root / "home"), "PATH": links(root / "bin", tried), "TERM": "dumb"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, printed.decode(errors="replace")


@pytest.mark.parametrize("tried", TRIED, ids=lambda tried: tried.name)
async def test_a_launched_agent_runs_a_tool_and_gives_its_result_to_the_model(tried: Tried, tmp_path: Path) -> None:
    mesh = ScriptedMesh(write_text_model(tmp_path / "m", TEMPLATE), limit=400_000)
    call = json.dumps({"name": tried.tool, "arguments": tried.arguments})

    async def answers(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        prompt = decoded(mesh, request)
        wants_call = tried.tool and f'"name": "{tried.tool}"' in prompt and "from-a-tool" not in prompt
        text = f"<tool_call>\n{call}\n</tool_call>" if wants_call else ANSWER
        for event in mesh.events(mesh.text.encode_text(text), request):
            yield event

    mesh.script = answers
    async with served(mesh, ApiOptions(access=AccessPolicy())) as api:
        code, printed = await launch(tried, api.url, tmp_path)
    assert code == 0 and ANSWER in printed, printed
    if tried.tool:
        prompts = [tuple(one.prompt_ids) for one in mesh.requests if f'"name": "{tried.tool}"' in decoded(mesh, one)]
        assert "from-a-tool" in decoded(mesh, mesh.request) and len(prompts) == 2
        assert min(shared(*pair) for pair in pairwise(prompts)) >= LEAST_SHARE
    left = {path.name for path in (tmp_path / "home").rglob("*") if "exo-mesh" in path.parts and path.is_file()}
    assert not left, "the run is undone"


async def test_two_conversations_of_claude_code_share_their_instructions_and_tools(tmp_path: Path) -> None:
    """It would begin its system prompt with a line that differs per conversation, if `launch` did not turn that off.
    What comes after the question, a list of its agents, is not shared."""
    mesh = ScriptedMesh(write_text_model(tmp_path / "m", TEMPLATE), answer=ANSWER, limit=400_000)
    async with served(mesh, ApiOptions(access=AccessPolicy())) as api:
        for question in ("What is in this project?", "Which day is it?"):
            tried = replace(TRIED[0], words=("-p", question))
            assert (await launch(tried, api.url, tmp_path))[0] == 0
    first, second = (tuple(request.prompt_ids) for request in mesh.requests)
    assert shared(first, second) >= 0.9
