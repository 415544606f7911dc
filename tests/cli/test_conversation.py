"""`exo-mesh run MODEL` without a prompt, in a terminal."""

from __future__ import annotations

import os
import pty
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from tests.support.processes import COMMAND, clean_environ, run_in
from tests.support.terminal import terminal

MODEL = "exo-mesh-demo"


@pytest.fixture(scope="module")
def slow_mesh() -> Iterator[LocalMesh]:
    """Two nodes with an instance over both, whose answers take seconds."""
    with local_mesh(2, ["--engine", "dummy", "--engine-option", "cost_ms=8"], "chat", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client().post("/instance", {"model": MODEL, "min_peers": 2}, 60.0)
        yield mesh


@pytest.mark.extended
def test_turns_without_a_screen_are_plain_text(slow_mesh: LocalMesh, tmp_path: Path) -> None:
    keyboard, inside = pty.openpty()
    argv = [*COMMAND, "run", MODEL, "--max-tokens", "4", "--api-url", slow_mesh.api_urls[0]]
    try:
        process = subprocess.Popen(
            argv, stdin=inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environ(tmp_path)
        )
        os.write(keyboard, b"Hello.\n" + b"/clear\n" + b"Hello again.\n" + b"/bye\n")
        shown, complaints = process.communicate(timeout=30)
    finally:
        os.close(keyboard)
        os.close(inside)
    assert process.returncode == 0
    assert "Talking to exo-mesh-demo." in shown and "\x1b" not in shown
    assert complaints.count("4 tokens, ") == 2


@pytest.mark.extended
def test_a_chat_keeps_what_was_said_over_stops_and_runs(slow_mesh: LocalMesh, tmp_path: Path) -> None:
    """The keys of a person: stop an answer, look, save, leave, come again."""
    argv = [*COMMAND, "run", MODEL, "--api-url", slow_mesh.api_urls[0], "--temperature", "0"]
    with terminal([*argv, "--max-tokens", "8"], clean_environ(tmp_path)) as chat:
        chat.wait_for(">>> ")
        chat.send("\x1b[200~one\ntwo\x1b[201~\r")  # pasted
        chat.wait_for("first after")
        chat.wait_for(">>> ")
        chat.send("/set max_tokens 300\r")
        chat.wait_for("max_tokens: 300")
        chat.wait_for(">>> ")
        chat.send("Count.\r")
        chat.wait_for("\n")
        chat.wait_for(" ")
        chat.send("\x03")
        chat.wait_for("(stopped)")
        chat.wait_for(">>> ")
        chat.send("/sa\tfirst\r")
        chat.wait_for("saved as")
        chat.wait_for(">>> ")
        chat.interrupt("Use Ctrl-D")
        chat.wait_for(">>> ")
        chat.send("\x04")
        assert chat.wait_end() == 0
    assert stat.S_IMODE((tmp_path / "chat_history").stat().st_mode) == 0o600
    with terminal(argv, clean_environ(tmp_path)) as chat:
        chat.wait_for(">>> ")
        chat.send("/load fir\t\r")
        chat.wait_for("first: 4 messages")
        chat.wait_for(">>> ")
        chat.send("/show messages\r")
        said = chat.wait_for("user: Count.")
        assert "user: one\ntwo\nassistant: " in said
        chat.wait_for(">>> ")
        chat.send("\x1b[A" * 6)  # up to the first question of the run before
        chat.wait_for("\ntwo")
        chat.send("\x15/bye\r")
        chat.wait_end()


@pytest.mark.extended
def test_an_answer_is_whole_when_the_node_that_gives_it_dies(slow_mesh: LocalMesh, tmp_path: Path) -> None:
    """The last test of this mesh, since it kills a node of it."""
    question = ["run", MODEL, "Count from 7 to 90.", "--temperature", "0", "--max-tokens", "90"]
    whole = run_in(clean_environ(tmp_path), [*question, "--api-url", slow_mesh.api_urls[1]]).stdout.strip()
    argv = [*COMMAND, *question[:2], *question[3:], "--plain", "--api-url", slow_mesh.api_urls[0]]
    with terminal(argv, clean_environ(tmp_path), (200, 24)) as chat:
        chat.wait_for(">>> ")
        chat.send(f"{question[2]}\r")
        chat.wait_for(whole[:20])
        os.kill(slow_mesh.children[0].pid, signal.SIGKILL)
        rest = chat.wait_for("tokens, ", 60)
        assert whole[:20] + rest.partition("\n")[0] == whole
        chat.wait_for(">>> ")
        chat.send("/show\r")
        assert "peer-2" in chat.wait_for("messages")
        chat.wait_for(">>> ")
        chat.send("\x04")
        assert chat.wait_end() == 0
