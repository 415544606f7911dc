"""The coding agent Claude Code, unmodified, against the API over a scripted model.

CLAUDE_CODE names the program (docs/tasks/clients.md says how to install it). Its prompt has about 20,000 tokens, which
no model of the test machines can read; so the model's answers are written here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.domain.request import GenerateRequest, Progress, TokenEvent
from tests.api.conftest import OPEN_ADMIN
from tests.api.openai.test_tools import TEMPLATE
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.text.text_models import write_text_model

PROGRAM = os.environ.get("CLAUDE_CODE")
LIMIT_S = 60
CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo from-a-tool", "description": "say"}}\n</tool_call>'

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(PROGRAM is None, reason="CLAUDE_CODE is not set: the program claude is needed"),
]


async def ask(url: str, folder: Path, question: str) -> str:
    """All that Claude Code prints."""
    environ = {
        **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
        "HOME": str(folder),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "unused",
        "ANTHROPIC_MODEL": "exo-mesh-demo",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "exo-mesh-demo",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    process = await asyncio.create_subprocess_exec(
        str(PROGRAM), "-p", question, "--allowedTools", "Bash",
        cwd=folder, env=environ, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return printed.decode()


async def test_claude_code_runs_a_tool_and_gives_its_result_to_the_model(tmp_path: Path) -> None:
    mesh = ScriptedMesh(write_text_model(tmp_path / "m", TEMPLATE), limit=2_000_000)

    async def answers(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        text = CALL if len(mesh.requests) == 1 else "The tool has answered."
        for event in mesh.events(mesh.text.encode_text(text), request):
            yield event

    mesh.script = answers
    async with served(mesh, ApiOptions(access=OPEN_ADMIN)) as api:
        printed = await ask(api.url, tmp_path, "Run a command.")
    prompt = mesh.text.tokenizer.decode(list(mesh.request.prompt_ids), skip_special_tokens=False)
    assert printed.strip() == "The tool has answered."
    assert "<|im_start|>tool\nfrom-a-tool<|im_end|>" in prompt and '"name": "Bash"' in prompt
