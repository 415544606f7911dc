"""What the page sends to which node: its key, its session, or nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.web.assets import FOLDER

NODE = shutil.which("node")
HERE = Path(__file__).parent
TOKEN = "exo-local-" + "A" * 43

pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")


def shown(folder: Path, key: str, *, closed: bool, refuses: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a page with this key sent: to its own node, of a closed or an open mesh, and then to another one."""
    shutil.copytree(FOLDER / "app", folder / "app")
    shutil.copy(HERE / "call_mesh.mjs", folder)
    (folder / "package.json").write_text('{"type": "module"}')
    assert NODE is not None
    scenario = json.dumps({"key": key, "closed": closed, "refuses": refuses})
    done = subprocess.run(
        [NODE, "call_mesh.mjs"], cwd=folder, input=scenario, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    for name in ("here", "other"):
        sent = [text for url, text in found["calls"] if url.startswith(f"http://{name}") and "/v1/session" not in url]
        found[name] = list(dict.fromkeys(sent))
    return found


@pytest.mark.parametrize("key", [TOKEN, "xm-key"])
def test_a_page_of_an_open_mesh_sends_its_key_to_its_own_node_only(tmp_path: Path, key: str) -> None:
    found = shown(tmp_path, key, closed=False)
    assert (found["here"], found["other"]) == ([key], [""]), "any machine can join an open mesh, and call it closed"
    assert found["timers"] == [], "there will be no session"


def test_a_page_of_a_closed_mesh_sends_its_session_or_key_to_every_member_and_never_the_token(tmp_path: Path) -> None:
    found = shown(tmp_path / "token", TOKEN, closed=True)
    assert (found["here"], found["other"]) == (["exo-session-1"], ["exo-session-1"])
    assert shown(tmp_path / "key", "xm-key", closed=True)["other"] == ["xm-key"]
    found = shown(tmp_path / "none", TOKEN, closed=True, refuses=("session 1",))
    assert (found["here"], found["other"]) == ([TOKEN], [""])
    assert found["timers"] == [60_000], "it tries again"


def test_a_page_whose_session_ended_gets_another_one_before_it_asks_for_a_key(tmp_path: Path) -> None:
    found = shown(tmp_path, TOKEN, closed=True, refuses=("exo-session-1",))
    assert (found["here"], found["other"]) == (["exo-session-1", "exo-session-2"], ["exo-session-2"])
    assert found["timers"] == [50_000, 50_000] and not found["needsKey"]
