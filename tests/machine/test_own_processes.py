"""Which processes count as those of exo-mesh, and of which node; they are ended, also where they do not listen."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from exo_mesh.machine.own_processes import OwnProcess, end_processes, home_of, kind_of, own_processes


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("/v/bin/python /v/bin/exo-mesh", "node"),
        ("/v/bin/python3.11 /v/bin/exo-mesh serve --home /h", "node"),
        ("/v/bin/exo-mesh --engine mlx", "node"),
        ("/v/bin/python -X dev -m exo_mesh.cli.main demo", ""),  # an option with a value of its own: not guessed
        ("/v/bin/python -m exo_mesh.cli.main serve", "node"),
        ("/v/bin/python -m exo_mesh.rings.runner --control-fd 4", "runner"),
        ("/v/bin/python -m exo_mesh.text.template_child 5", "helper"),
        ("/v/bin/python -m exo_mesh.models.fetcher", "helper"),
        ("/v/bin/python -m exo_mesh.cli.main node kill-all", ""),
        ("/v/bin/python /v/bin/exo-mesh status", ""),
        ("/v/bin/python -m pip install exo-mesh", ""),
        ("vim exo-mesh", ""),
        ("git clone exo-mesh", ""),
        ("", ""),
    ],
)
def test_the_command_line_says_what_a_process_is(line: str, kind: str) -> None:
    assert kind_of(line.split()) == kind


def test_a_flag_names_the_home_before_the_environment_and_the_default() -> None:
    environ = {"EXO_MESH_HOME": "/of/environ", "HOME": "/home/bob"}
    here = {"HOME": "/home/alice"}
    assert home_of(["exo-mesh", "--home", "/flag"], environ, here, "/usual") == "/flag"
    assert home_of(["exo-mesh", "--home=/flag"], environ, here, "/usual") == "/flag"
    assert home_of(["exo-mesh", "--home=~/flag"], environ, here, "/usual") == "/home/bob/flag"
    assert home_of(["exo-mesh"], environ, here, "/usual") == "/of/environ"
    assert home_of(["exo-mesh"], {}, here, "/usual") == "/usual"


@pytest.mark.parametrize(
    ("environ", "here", "home"),
    [
        ({"HOME": "/home/alice"}, {"HOME": "/home/alice"}, "/home/alice/.local/share/exo-mesh"),
        ({"HOME": "/home/bob"}, {"HOME": "/home/alice"}, "/home/bob/.local/share/exo-mesh"),
        ({"HOME": "/srv/carol/"}, {"HOME": "/home/alice"}, "/srv/carol/.local/share/exo-mesh"),
        ({"HOME": "/home/bob", "XDG_DATA_HOME": "/data"}, {"HOME": "/home/alice"}, "/data/exo-mesh"),
        ({"HOME": "/home/bob"}, {"HOME": "/home/alice", "XDG_DATA_HOME": "/home/alice/.local/share"}, ""),
        ({}, {"HOME": "/home/alice"}, ""),
    ],
)
def test_the_usual_home_of_a_process_follows_from_its_own_environment(
    environ: dict[str, str], here: dict[str, str], home: str
) -> None:
    assert home_of(["exo-mesh"], environ, here, "/home/alice/.local/share/exo-mesh") == home


def test_the_peers_of_a_demo_have_homes_of_their_own() -> None:
    here = {"HOME": "/h"}
    assert home_of(["/v/bin/python", "/v/bin/exo-mesh", "demo"], here, here, "/h/.local/share/exo-mesh") == ""
    assert home_of(["exo-mesh", "--name", "demo"], here, here, "/h/usual") == "/h/usual"
    words = ["python", "-m", "exo_mesh.cli.main", "serve", "--home", "/of/demo/peer-1"]
    assert home_of(words, here, here, "/usual") == "/of/demo/peer-1"


def test_what_ignores_sigterm_is_killed_after_the_grace_and_a_pid_that_is_gone_has_ended(tmp_path: Path) -> None:
    deaf = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        both = [OwnProcess(pid, os.getpid(), "node", str(tmp_path), 0) for pid in (child.pid, gone.pid)]
        assert end_processes(both, 0.1) == {child.pid: "killed", gone.pid: "ended"}


def test_a_relative_home_is_that_of_the_directory_in_which_its_node_was_started(tmp_path: Path) -> None:
    program = tmp_path / "exo-mesh"
    program.write_text("import sys\nprint(1, flush=True)\nsys.stdin.read()\n")
    with ExitStack() as stack:
        pids = {}
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            argv, pipe = [sys.executable, str(program), "serve", "--home", "h1"], subprocess.PIPE
            child = stack.enter_context(subprocess.Popen(argv, cwd=tmp_path / name, stdin=pipe, stdout=pipe))
            assert child.stdout is not None and child.stdout.readline()
            pids[name] = child.pid
        home = tmp_path / "b" / "h1"
        assert [(one.pid, one.home) for one in own_processes(tmp_path, home)] == [(pids["b"], str(home))]


def test_a_node_of_another_home_directory_is_not_one_of_this_home(tmp_path: Path) -> None:
    program = tmp_path / "exo-mesh"
    program.write_text("import sys\nprint(1, flush=True)\nsys.stdin.read()\n")
    here = Path(os.environ["HOME"])
    usual = here / "share" / "exo-mesh"
    environ = {name: text for name, text in os.environ.items() if name not in ("XDG_DATA_HOME", "EXO_MESH_HOME")}
    argv, pipe = [sys.executable, str(program)], subprocess.PIPE
    with subprocess.Popen(argv, env=environ | {"HOME": str(tmp_path)}, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert child.pid not in [one.pid for one in own_processes(usual, usual)]
        found = own_processes(usual, tmp_path / "share" / "exo-mesh")
        assert [(one.pid, one.home) for one in found] == [(child.pid, str(tmp_path / "share" / "exo-mesh"))]
