"""The coding agent Codex, unmodified, against the API over a scripted model.

CODEX names the program (docs/tasks/clients.md says how to install it). Its prompt has about 10,000 tokens, which no
model of the test machines can read; so the model's answers are written here.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.domain.request import GenerateRequest, Progress, TokenEvent
from tests.api.conftest import OPEN_ADMIN
from tests.api.openai.test_tools import TEMPLATE
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.text.text_models import write_text_model

PROGRAM = os.environ.get("CODEX")
LIMIT_S = 60
CALL = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo from-a-tool"}}\n</tool_call>'
CONFIG = """
model = "exo-mesh-demo"
model_provider = "mesh"
web_search = "disabled"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.mesh]
name = "mesh"
base_url = "URL/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(PROGRAM is None, reason="CODEX is not set: the program codex is needed"),
]


async def ask(url: str, folder: Path, question: str) -> list[dict[str, Any]]:
    """The events that Codex prints."""
    home = folder / "codex-home"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.replace("URL", url))
    environ = {
        **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
        "HOME": str(folder),
        "CODEX_HOME": str(home),
    }
    process = await asyncio.create_subprocess_exec(
        str(PROGRAM), "exec", "--skip-git-repo-check", "--json", question,
        cwd=folder, env=environ, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return [json.loads(line) for line in printed.decode().splitlines() if line.startswith("{")]


async def test_codex_thinks_runs_a_command_and_gives_its_output_to_the_model(tmp_path: Path) -> None:
    mesh = ScriptedMesh(write_text_model(tmp_path / "m", TEMPLATE), limit=2_000_000)

    async def answers(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        text = f"<think>I run it.</think>\n\n{CALL}" if len(mesh.requests) == 1 else "The tool has answered."
        for event in mesh.events(mesh.text.encode_text(text), request):
            yield event

    mesh.script = answers
    async with served(mesh, ApiOptions(access=OPEN_ADMIN)) as api:
        events = await ask(api.url, tmp_path, "Run a command.")
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    said = {item["type"]: item for item in done}
    assert said["reasoning"]["text"] == "I run it."
    assert said["command_execution"]["aggregated_output"].strip() == "from-a-tool"
    assert said["agent_message"]["text"] == "The tool has answered." and events[-1]["type"] == "turn.completed"
    prompt = mesh.text.tokenizer.decode(list(mesh.request.prompt_ids), skip_special_tokens=False)
    assert "<|im_start|>tool\n" in prompt and "from-a-tool" in prompt and '"name": "exec_command"' in prompt
