"""`.ci/run` keeps the quick tests off the network and within a limit of CPU time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "run"

REACH = """
import socket
with socket.socketpair()[0], socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()[:2], 5).close()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    try:
        one.connect(("192.0.2.1", 9))
    except OSError:
        print("loopback only")
"""


def shell(names: str, commands: str, scratch: Path) -> str:
    """What bash prints for these commands, with the functions of the script that have these names."""
    text = SCRIPT.read_text()
    found = [re.search(rf"^{name}\(\) \{{.*?}}$", text, re.M | re.S) for name in names.split()]
    functions = [one.group() for one in found if one]
    assert len(functions) == len(names.split())
    program = "\n".join([f"scratch={scratch}", *functions, commands])
    return subprocess.run(["bash", "-euc", program], check=True, capture_output=True, text=True).stdout


def test_the_quick_tests_run_where_only_the_loopback_is(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode:
        pytest.skip("network namespaces need Linux and root")
    code = tmp_path / "reach.py"
    code.write_text(REACH)
    assert shell("has offline", f"offline {sys.executable} {code}", tmp_path) == "loopback only\n"
    assert re.search(r"within=\(offline\)\nwith_second_try .*\nwithin=\(\)\n", SCRIPT.read_text())


def test_the_cpu_time_of_children_is_counted(tmp_path: Path) -> None:
    assert shell("cpu_s", "cpu_s; echo $REPLY", tmp_path) == "0\n"
    spin = f"{sys.executable} -c 'import time\nwhile time.process_time() < 1.1: pass'"
    assert int(shell("cpu_s", f"( {spin} ) | cat; cpu_s; echo $REPLY", tmp_path)) >= 1


def test_variables_of_what_is_fetched_at_a_time_are_those_of_the_tests(tmp_path: Path) -> None:
    commands = (
        "npm() { case $* in *broken*) return 1; esac; }\n"
        "take_variables\n"
        "fetch_node_packages FIRST_DIR first a@1 b@2 &\nfetch_node_packages BROKEN_DIR broken c@3 &\nwait\n"
        "take_variables\nenv | grep _DIR="
    )
    shown = shell("note_variable take_variables fetch_node_packages", commands, tmp_path).splitlines()
    assert f"FIRST_DIR={tmp_path}/first" in shown and not any(line.startswith("BROKEN_DIR=") for line in shown)
    assert "c@3 cannot be installed here: the tests that need BROKEN_DIR will be skipped" in shown
