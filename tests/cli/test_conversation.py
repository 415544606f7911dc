"""`exo-mesh run MODEL` without a prompt, in a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from exo_mesh.client.child_node import ChildNode
from tests.support.processes import COMMAND, QUIET_FLAGS, clean_environ


@pytest.mark.extended
def test_a_conversation_has_turns_and_ends_with_bye(tmp_path: Path) -> None:
    node = ChildNode(["--api-port", "0", *QUIET_FLAGS], tmp_path / "log", clean_environ(tmp_path))
    terminal, inside = pty.openpty()
    try:
        argv = [*COMMAND, "run", "exo-mesh-demo", "--max-tokens", "4", "--verbose"]
        url = node.wait_ready(60)["api_url"]
        process = subprocess.Popen(
            [*argv, "--api-url", url],
            stdin=inside,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environ(tmp_path),
        )
        os.write(terminal, b"Hello.\n" + b"/clear\n" + b"Hello again.\n" + b"/bye\n")
        shown, complaints = process.communicate(timeout=30)
    finally:
        os.close(terminal)
        os.close(inside)
        node.stop()
    assert process.returncode == 0
    assert "Talking to exo-mesh-demo." in shown
    assert complaints.count("4 tokens, ") == 2
