"""The coding agent opencode, unmodified, against a mesh of two peers.

OPENCODE names the program (docs/tasks/clients.md says how to install it). At its first start in a folder with a tool of
the user it fetches its package for tools from the npm registry.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.peers import MODEL, Peer

PROGRAM = os.environ.get("OPENCODE")
LIMIT_S = 300
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROGRAM is None, reason="OPENCODE is not set: the program opencode is needed"),
]

TOOL = """import { tool } from "@opencode-ai/plugin"
export default tool({
  description: "Tells the weather of a city.",
  args: { city: tool.schema.string() },
  async execute(args) { return JSON.stringify({ city: args.city, temperature: 18 }) },
})
"""


def settings_for(url: str) -> dict[str, object]:
    """One provider, and an agent whose prompt and tools fit the demo model; opencode itself offers some ten tools."""
    model = {"name": MODEL, "limit": {"context": 8192, "output": 1024}}
    options = {"baseURL": f"{url}/v1", "apiKey": "unused"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "mesh", "options": options, "models": {MODEL: model}}
    agent = {"mode": "primary", "prompt": "You are a helpful assistant.", "temperature": 0}
    names = {"model": f"mesh/{MODEL}", "small_model": f"mesh/{MODEL}"}
    tools = {"*": False, "get_weather": True}
    return {**names, "provider": {"mesh": provider}, "agent": {"short": {**agent, "tools": tools}}, "share": "disabled"}


@pytest.fixture(scope="module")
def folder(entry: Peer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with its settings and one tool of the user."""
    root = tmp_path_factory.mktemp("opencode")
    project = root / "project"
    (project / ".opencode" / "tool").mkdir(parents=True)
    (root / "home").mkdir()
    (project / "opencode.json").write_text(json.dumps(settings_for(entry.url)))
    (project / ".opencode" / "tool" / "get_weather.ts").write_text(TOOL)
    return root


def ask(folder: Path, question: str) -> str:
    """All that opencode prints: its name, calls and the answer."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environ = {**kept, "HOME": str(folder / "home"), "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    argv = [str(PROGRAM), "run", "--agent", "short", question]
    done = subprocess.run(
        argv, cwd=folder / "project", env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)


def test_opencode_gets_an_answer(folder: Path) -> None:
    assert "7, 8, 9, 10, 11, 12\n" in ask(folder, "Count from 7 to 12.")


def test_opencode_runs_a_tool_and_gives_its_result_to_the_model(folder: Path) -> None:
    printed = ask(folder, "What is the weather in Paris?")
    assert 'get_weather {"city":"Paris"}' in printed and "It is 18 degrees" in printed, printed
