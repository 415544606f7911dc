"""The token in a node's home: made once, for its owner only, and sent to nobody else."""

from __future__ import annotations

import os
import pty
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import client_of, running_node
from exo_mesh.cli.main import main
from exo_mesh.errors import MeshError
from exo_mesh.security.local_token import FILE_NAME, PREFIX, is_token, read_token, take_token
from exo_mesh.security.own_nodes import ListeningMark, token_for
from tests.support.processes import COMMAND, QUIET_FLAGS, clean_environ, run


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert read_token(home) == ""
    token = take_token(home)
    assert take_token(home) == read_token(home) == token
    assert take_token(tmp_path / "other") != token
    assert token.startswith(PREFIX) and len(token) == len(PREFIX) + 43, "256 bits"
    assert mode_of(home / FILE_NAME) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_one_that_others_could_read_is_replaced(tmp_path: Path, mode: int) -> None:
    token = take_token(tmp_path)
    (tmp_path / FILE_NAME).chmod(mode)
    assert take_token(tmp_path) != token
    assert mode_of(tmp_path / FILE_NAME) == 0o600


@pytest.mark.parametrize("text", ["", "x", PREFIX, PREFIX + "a" * 42, PREFIX + "a" * 500, "\xff"])
def test_a_damaged_one_is_no_token_and_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text, encoding="latin-1")
    (tmp_path / FILE_NAME).chmod(0o600)
    assert read_token(tmp_path) == ""
    assert take_token(tmp_path) == read_token(tmp_path) != ""


def test_the_verb_key_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "local", "--home", str(tmp_path)]) == exit_codes.FAILED
    assert "a node writes it at its start" in capsys.readouterr().err
    token = take_token(tmp_path)
    assert main(["key", "local", "--home", str(tmp_path)]) == exit_codes.OK
    assert capsys.readouterr().out == f"{token}\n"


def test_nothing_equals_an_empty_token() -> None:
    assert is_token(PREFIX + "a", PREFIX + "a")
    for text in ("", "a", "\udcff"):
        assert not is_token(text, "") and not is_token(text, PREFIX + "a")


def test_it_is_for_ports_that_a_live_node_of_the_home_listens_on(tmp_path: Path) -> None:
    token = take_token(tmp_path)
    assert token_for([tmp_path], "127.0.0.1", 7000) == ""
    mark = ListeningMark(tmp_path, "0.0.0.0", 7000)
    for host in ("127.0.0.1", "localhost", "127.0.5.5"):
        assert token_for([tmp_path], host, 7000) == token
    for host, port in (
        ("127.0.0.1", 7001),
        ("::1", 7000),
        ("192.0.2.5", 7000),
        ("localhost.evil.example", 7000),
        ("", 80),
    ):
        assert token_for([tmp_path], host, port) == ""
    mark.close()
    assert token_for([tmp_path], "127.0.0.1", 7000) == ""
    bound = ListeningMark(tmp_path, "192.168.1.5", 7000)
    assert token_for([tmp_path], "192.168.1.5", 7000) == token
    assert token_for([tmp_path], "127.0.0.1", 7000) == "", "another program can listen there"
    bound.close()


def test_the_mark_of_a_killed_node_counts_no_more(tmp_path: Path) -> None:
    token = take_token(tmp_path)
    program = (
        "import pathlib, sys; from exo_mesh.security.own_nodes import ListeningMark; "
        "mark = ListeningMark(pathlib.Path(sys.argv[1]), '127.0.0.1', 7000); print('there', flush=True); input()"
    )
    command = [COMMAND[0], "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        assert token_for([tmp_path], "127.0.0.1", 7000) == token
        process.kill()
        process.wait()
    assert token_for([tmp_path], "127.0.0.1", 7000) == ""
    ListeningMark(tmp_path, "127.0.0.1", 7001).close()
    assert not list((tmp_path / "listening").iterdir()), "what the dead left is removed"


def test_nodes_of_one_home_have_a_mark_each(tmp_path: Path) -> None:
    take_token(tmp_path)
    marks = [ListeningMark(tmp_path, "127.0.0.1", port) for port in (7000, 7001)]
    with pytest.raises(FileExistsError):
        ListeningMark(tmp_path, "127.0.0.2", 7000)
    marks[0].close()
    assert [bool(token_for([tmp_path], "127.0.0.1", port)) for port in (7000, 7001)] == [False, True]
    marks[1].close()


def test_the_client_shows_it_to_its_own_node_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXO_MESH_HOME", str(tmp_path))
    monkeypatch.delenv("EXO_MESH_API_KEY", raising=False)
    token = take_token(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        assert ApiClient(url).credentials() == {}, "some other program listens there"
        mark = ListeningMark(tmp_path, "127.0.0.1", port)
        assert ApiClient(url).credentials() == {"Authorization": f"Bearer {token}"}
        assert ApiClient(url, tmp_path / "other").credentials() == {}
        assert ApiClient(f"http://beta:{port}").credentials() == {}
        monkeypatch.setenv("EXO_MESH_API_KEY", "xm-key")
        assert ApiClient(url).credentials() == {"Authorization": "Bearer xm-key"}
        mark.close()


@pytest.mark.extended
def test_the_command_line_of_this_machine_may_change_an_open_mesh_and_others_may_not(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with running_node(home, ["--engine", "dummy"], clean_environ(home)) as node:
        ready = node.ready
        assert "may read and chat" in ready["access"]
        stranger = ApiClient(ready["api_url"], tmp_path / "other")
        with pytest.raises(MeshError, match="--open-admin"):
            stranger.post("/drain", {})
        chat = {"max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
        assert stranger.post("/v1/chat/completions", chat, 60)["usage"]["completion_tokens"] == 2, "it may load a model"
        assert client_of(ready).get("/drain")["draining"] is False
        assert run(["drain", "--api-url", ready["api_url"]], tmp_path / "other").returncode == 1
        assert run(["drain", "--api-url", ready["api_url"], "--home", str(home)], tmp_path / "other").returncode == 0
        assert run(["drain", "--undo", "--api-url", ready["api_url"]], home).returncode == 0
    token = read_token(home)
    assert token and token not in node.log_path.read_text(), "what it writes may be kept"
    assert not list((home / "listening").iterdir())


@pytest.mark.extended
def test_the_address_with_the_token_is_for_terminals(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "--api-port", "0", *QUIET_FLAGS]
    environ = {**clean_environ(tmp_path), "COLUMNS": "200"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environ) as process:
        shown = b""
        while b"Ctrl-C" not in shown:
            shown += os.read(ours, 4096)
        process.terminate()
        process.wait(10)
    os.close(ours)
    os.close(theirs)
    assert f"/#token={read_token(tmp_path)}" in shown.decode()
