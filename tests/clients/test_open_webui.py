"""Open WebUI, unmodified, in Chromium, against a mesh of two peers.

OPEN_WEBUI names the program `open-webui` (docs/tasks/clients.md says how to install it); PAGE_CHROMIUM the browser,
which is chromium in the path by default.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from exo_mesh.cli.client.child_node import free_port
from tests.support.peers import MODEL, Peer
from tests.support.processes import eventually

playwright = pytest.importorskip("playwright.sync_api", reason="Open WebUI is driven with playwright")
CHROMIUM = os.environ.get("PAGE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
PROGRAM = os.environ.get("OPEN_WEBUI")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is needed; PAGE_CHROMIUM names it"),
    pytest.mark.skipif(PROGRAM is None, reason="OPEN_WEBUI is not set: the program open-webui is needed"),
]

START_S, ANSWER_S = 500, 120
COUNTED = ", ".join(str(number) for number in range(7, 21))
BACKGROUND_CALLS = 2  # at least: a title and follow-up questions; tags in most versions
OFFLINE = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "of this test only, and long enough for its library",
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",  # otherwise it loads a model of its own
    "ENABLE_OLLAMA_API": "False",
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "true",
    "SCARF_NO_ANALYTICS": "true",
}
NO_TOOLS = {"DEFAULT_MODEL_METADATA": '{"capabilities": {"builtin_tools": false}}'}
"""Open WebUI offers the model more than ten tools of its own otherwise; the demo model knows two."""


def is_healthy(url: str) -> bool:
    with contextlib.suppress(URLError, OSError), urlopen(f"{url}/health", timeout=2) as reply:
        return bool(reply.status == 200)
    return False


@pytest.fixture(scope="module")
def web_ui(entry: Peer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an Open WebUI whose only connection is the mesh."""
    home = tmp_path_factory.mktemp("open-webui")
    data = home / "served" / "data"
    data.mkdir(parents=True)
    port = free_port()
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    connection = {"OPENAI_API_BASE_URL": f"{entry.url}/v1", "OPENAI_API_KEY": "unused"}
    environ = {**kept, **OFFLINE, **NO_TOOLS, **connection, "HOME": str(home), "DATA_DIR": str(data)}
    argv = [str(PROGRAM), "serve", "--host", "127.0.0.1", "--port", str(port)]
    log = home / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(argv, cwd=data, env=environ, stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"
        assert eventually(lambda: process.poll() is not None or is_healthy(url), START_S), tail(log)
        assert process.poll() is None, tail(log)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


@pytest.fixture
def page(web_ui: str) -> Iterator[Any]:
    """The first visit: the news of the version are closed, and the model is chosen already, being the only one."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page(locale="en-US", viewport={"width": 1200, "height": 800})
        opened.set_default_timeout(ANSWER_S * 1000)
        opened.goto(web_ui)
        opened.get_by_role("button", name="Okay, Let's Go!").click()
        playwright.expect(opened.get_by_label(f"Selected model: {MODEL}")).to_be_visible()
        yield opened
        browser.close()


def ask(page: Any, question: str) -> None:
    page.locator("#chat-input").click()
    page.keyboard.type(question)
    page.keyboard.press("Enter")


def recent(peer: Peer) -> list[dict[str, Any]]:
    """The last requests that reached the peer, newest first."""
    return list(peer.api.get("/requests/recent")["requests"])


def outcome_of(peer: Peer, num_tokens: int) -> str:
    """Of the newest request whose answer has at least so many tokens; empty without one."""
    return next((one["outcome"] for one in recent(peer) if one["output_tokens"] >= num_tokens), "")


def test_a_chat_a_stopped_answer_and_the_page_loaded_again(page: Any, entry: Peer) -> None:
    ask(page, "Count from 7 to 20.")
    answers = page.locator(".chat-assistant")
    playwright.expect(answers.last).to_have_text(re.compile(COUNTED), timeout=ANSWER_S * 1000)
    assert eventually(lambda: len(recent(entry)) > BACKGROUND_CALLS and entry.idle(), ANSWER_S)
    assert {one["status"] for one in recent(entry)} == {"ok"}, recent(entry)

    ask(page, "Count from 1 to 300.")
    playwright.expect(answers.nth(1)).to_contain_text("1, 2, 3", timeout=ANSWER_S * 1000)
    page.get_by_role("button", name="Stop").click()
    assert eventually(entry.idle, 10), "the mesh goes on with an answer that was stopped"
    assert outcome_of(entry, 8) == "cancelled", recent(entry)

    page.reload()
    playwright.expect(page.locator(".chat-assistant").first).to_have_text(re.compile(COUNTED))
