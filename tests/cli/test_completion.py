"""The completion scripts, as the shells use them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exo_mesh.cli.completion import SHELLS, script
from exo_mesh.cli.main import VERBS, main
from exo_mesh.cli.model_verbs import MODEL_VERBS

ASK_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_TYPE=9; COMPREPLY=()
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
        ("exo-mesh ", {*VERBS, *MODEL_VERBS}),
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
    assert all(verb in text for verb in (*VERBS, *MODEL_VERBS))


def test_help_does_not_import_shtab() -> None:
    code = "import sys\nfrom exo_mesh.cli.main import main\nmain(['--help'])\nassert 'shtab' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
