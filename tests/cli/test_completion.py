"""The completion scripts, as the shells use them."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from exo_mesh.cli.main import VERBS, main
from exo_mesh.cli.model_verbs import MODEL_VERBS
from exo_mesh.cli.verbs.completion import SHELLS, script
from tests.cli.closed_port import closed_port

ASK_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_LINE="$*"; COMP_CWORD=$(($# - 1)); COMP_TYPE=9; COMPREPLY=()
entry=$(complete -p exo-mesh); [[ $entry =~ -F\\ ([^ ]+) ]] || exit 3
"${BASH_REMATCH[1]}" exo-mesh "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "exo-mesh"
    path.write_text(script("bash"))
    return path


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("exo-mesh ", set(VERBS)),
        ("exo-mesh models ", {*MODEL_VERBS, "add", "delete"}),
        ("exo-mesh pull --w", {"--whole"}),
        ("exo-mesh do", {"doctor"}),
        ("exo-mesh --api-p", {"--api-port"}),
        ("exo-mesh serve --log-l", {"--log-level"}),
        ("exo-mesh serve --log-level ", {"debug", "info", "warning", "error"}),
        ("exo-mesh serve --placement t", {"throughput"}),
        ("exo-mesh config ", {"show", "reference"}),
        ("exo-mesh completion f", {"fish"}),
        ("exo-mesh status --j", {"--json"}),
    ],
)
def test_bash_completes(bash_script: Path, line: str, expected: set[str]) -> None:
    command = ["bash", "--norc", "-c", ASK_BASH, "bash", str(bash_script), *line.split(" ")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    answers = set(done.stdout.split())
    assert expected <= answers
    assert line.endswith(" ") or answers == expected


HOSTILE = "$(touch ${HOME}/owned)"


class NamesOfAMesh(http.server.BaseHTTPRequestHandler):
    """A node with two models, one instance, and a peer that has chosen a dangerous name."""

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        models = [{"id": "org/model-1", "aliases": ["m1"]}, {"id": "org/other", "aliases": [HOSTILE]}]
        view = {"peers": [{"name": "alpha"}, {"name": HOSTILE}], "instances": [{"id": "m-7", "model": "org/model-1"}]}
        body = json.dumps({"data": models} if self.path == "/v1/models" else {"view": view}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NamesOfAMesh) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("kind", "prefix", "names"),
    [
        ("models", "", ["m1", "org/model-1", "org/other"]), ("models", "org/m", ["org/model-1"]),
        ("instances", "", ["m-7", "org/model-1"]), ("peers", "", ["alpha"]), ("models", "$", []),
    ],
)  # fmt: skip
def test_names_are_those_of_the_mesh_and_safe(
    url: str, kind: str, prefix: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for line in (f"exo-mesh run --api-url {url} ", f"exo-mesh run --api-url={url} 'open quote"):
        assert main(["complete", kind, "--", prefix, line]) == 0
        assert capsys.readouterr().out.split() == names


def test_without_a_node_nothing_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "models", "--", "", f"exo-mesh run --api-url http://127.0.0.1:{closed_port()}"]) == 0
    assert capsys.readouterr() == ("", "")


ASK_ZSH = """
autoload -U compinit; compinit -u -d "$1/dump"
compadd() { print -l -- "${@[-1]}" "${(@P)@[-1]}"; }
source "$1/script"
words=(exo-mesh stop --api-url "$2" m); PREFIX=m
_exo_mesh_instances
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """`exo-mesh` of this tree is in the path."""
    program = tmp_path / "exo-mesh"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m exo_mesh.cli.main "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_ask_the_node_for_names(
    shell: str, url: str, bash_script: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script(shell))
    line = f"exo-mesh stop --api-url {url} m"
    commands = {
        "bash": ["bash", "--norc", "-c", ASK_BASH, "bash", str(bash_script), *line.split()],
        "zsh": ["zsh", "-f", "-c", ASK_ZSH, "zsh", str(tmp_path), url],
        "fish": [
            "fish",
            "--no-config",
            "-c",
            f"source {tmp_path}/script; complete -C 'exo-mesh stop --api-url {url} m'",
        ],
    }
    done = subprocess.run(commands[shell], capture_output=True, text=True, check=False, timeout=30, env=environ)
    assert "m-7" in done.stdout.split(), (done.stdout, done.stderr)
    assert "alpha" not in done.stdout
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_can_read_theirs(tmp_path: Path, shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(script(shell))
    checked = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, check=False, timeout=30)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_fish_completes(tmp_path: Path) -> None:
    if not shutil.which("fish"):
        pytest.skip("fish is not installed")
    (tmp_path / "script").write_text(script("fish"))
    asked = [f"source {tmp_path}/script; complete -C 'exo-mesh do'"]
    done = subprocess.run(
        ["fish", "--no-config", "-c", *asked], capture_output=True, text=True, check=False, timeout=30
    )
    assert "doctor" in done.stdout, done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_is_in_every_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in VERBS)


def test_help_does_not_import_shtab() -> None:
    code = "import sys\nfrom exo_mesh.cli.main import main\nmain(['--help'])\nassert 'shtab' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
