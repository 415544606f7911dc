"""`exo-mesh demo`: the first thing that a user sees."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from rich.console import Console

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.demo_screen import DemoScreen, ring_picture
from exo_mesh.cli.main import main
from exo_mesh.engine.contract import Availability
from exo_mesh.engine.registry import Registry
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.processes import eventually, gone, read_until, run, start


def test_once_answers_over_two_peers_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shown = run(["demo", "--once"], tmp_path, timeout_s=110)
    assert (shown.returncode, shown.stderr) == (exit_codes.OK, "")
    assert "exo-mesh-demo over 2 peers" in shown.stdout
    assert "peer-1" in shown.stdout
    assert "peer-2" in shown.stdout
    assert "tokens/s" in shown.stdout
    assert ", ".join(str(number) for number in range(7, 21)) in shown.stdout
    assert list(tmp_path.glob("exo-mesh-demo-*")) == []


@pytest.mark.extended
def test_it_goes_on_serving_until_it_is_stopped(tmp_path: Path) -> None:
    process, peers = _serving_demo(tmp_path)
    placed = run(["load", "exo-mesh-demo", "--on", "peer-2,peer-3"], tmp_path)
    assert placed.returncode == exit_codes.OK, f"another command has local rights by itself: {placed.stderr}"
    process.send_signal(signal.SIGTERM)
    _, complaints = process.communicate(timeout=10)
    assert (process.returncode, complaints) == (exit_codes.OK, "")
    assert gone(peers)


@pytest.mark.extended
def test_no_peer_outlives_a_demo_that_is_killed(tmp_path: Path) -> None:
    process, peers = _serving_demo(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert eventually(lambda: gone(peers), 6)


def _serving_demo(tmp_path: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A demo of dummy engines that serves, and all processes below it."""
    process = start(["demo", "--engine", "dummy", "--peers", "3", "--api-port", "0"], tmp_path)
    shown = read_until(process, "Ctrl-C")
    assert "over 3 peers" in shown, process.stderr.read() if process.stderr else ""
    url = next(word for word in shown.split() if word.startswith("http://")).removesuffix("/v1")
    assert len(ApiClient(url).get("/state")["view"]["peers"]) == 3
    peers = psutil.Process(process.pid).children(recursive=True)
    assert len(peers) >= 6
    return process, peers


@dataclasses.dataclass
class Provider:
    """An engine as the registry shows it."""

    look: Availability
    name: str = "mlx"
    kind: str = "stage"

    def availability(self) -> Availability:
        return self.look


class Started(Exception):
    """Raised in place of starting a mesh, with the arguments."""


def started_mesh(*args: object) -> NoReturn:
    raise Started(*args)


@pytest.mark.parametrize("wanted", ["auto", "dummy"])
def test_its_nodes_keep_the_engine_setting_so_that_auto_runs_other_formats_too(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exo_mesh.cli.verbs.demo.local_mesh", started_mesh)
    with pytest.raises(Started) as started:
        main(["demo", "--engine", wanted])
    assert started.value.args[1] == ["--engine", wanted]


@pytest.mark.parametrize("text", ["models/own", "./models/own", "{root}/models/own"])
def test_a_model_of_the_user_is_given_to_every_peer(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write_checkpoint(tmp_path / "models" / "own", TinyModel(layers=2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("exo_mesh.cli.verbs.demo.local_mesh", started_mesh)
    with pytest.raises(Started) as started:
        main(["demo", "--model", text.format(root=tmp_path)])
    assert started.value.args[1] == ["--engine", "auto", "--models-dir", str(own)]


def test_a_model_of_this_machine_may_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_checkpoint(tmp_path / "models" / "org" / "own", TinyModel(layers=2))
    monkeypatch.setenv("EXO_MESH_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setattr("exo_mesh.cli.verbs.demo.local_mesh", started_mesh)
    with pytest.raises(Started) as started:
        main(["demo", "--model", "org/own"])
    assert started.value.args[1] == ["--engine", "auto", "--models-dir", str(own)]
    assert main(["demo", "--model", "org/owl"]) != exit_codes.OK
    assert 'no model "org/owl" on this machine; near: org/own' in capsys.readouterr().err


def test_without_the_model_no_peer_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(tmp_path / "none.gguf")]) != exit_codes.OK
    assert "none.gguf does not exist" in capsys.readouterr().err


@pytest.mark.extended
def test_it_shows_a_model_of_the_user_and_a_refusal_without_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shipped = Path(str(resources.files("exo_mesh.weights") / "shipped" / "exo-mesh-demo"))
    shutil.copytree(shipped, tmp_path / "own")
    asked = ["demo", "--once", "--api-port", "0", "--model", str(tmp_path / "own"), "--peers"]
    shown = run([*asked, "1", "--engine", "numpy"], tmp_path, timeout_s=110)
    assert (shown.returncode, shown.stderr) == (exit_codes.OK, "")
    assert "own over 1 peer" in shown.stdout
    assert ", ".join(str(number) for number in range(7, 21)) in shown.stdout
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    shown = run([*asked, "1", "--engine", "numpy"], tmp_path, timeout_s=110)
    assert shown.returncode != exit_codes.OK
    assert "unheard-of" in shown.stderr and "node.log" not in shown.stderr
    assert list(tmp_path.glob("exo-mesh-demo-*")) == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_page_with_local_rights_is_linked_on_a_terminal_and_in_no_log(
    is_terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, width=200, color_system=None)
    DemoScreen(console).serving(["http://127.0.0.1:5"], "m", "exo-local-secret")
    shown = written.getvalue() + capsys.readouterr().out
    assert ("http://127.0.0.1:5/#token=exo-local-secret" in shown) is is_terminal
    assert "Page in a browser" in shown and ("exo-local-secret" in shown) is is_terminal


def test_a_deep_model_has_a_line_of_at_most_32_blocks() -> None:
    cuts = (0, 1, 79, 80)
    stages = [{"peer": "a", "layers": [start, stop], "engine": "mlx"} for start, stop in pairwise(cuts)]
    first, middle, last = ring_picture(stages, {"a": "alpha"}).plain.split("\n")[1:4]
    assert [line.count("█") for line in (first, middle, last)] == [1, 31, 1]
    assert {line.count("█") + line.count("·") for line in (first, middle, last)} == {32}


@pytest.mark.parametrize(
    ("registry", "message"),
    [
        (Registry({}, {}), 'exo-mesh: --engine mlx: no engine "mlx"; installed: none\n'),
        (
            Registry({}, {"mlx": "no module x"}),
            "exo-mesh: --engine mlx: engine mlx is installed but does not import: no module x\n",
        ),
        (
            Registry({"mlx": Provider(Availability(False, "mlx is not installed", "Try pip install."))}, {}),  # type: ignore[dict-item]
            "exo-mesh: --engine mlx: engine mlx cannot run here: mlx is not installed (Try pip install.)\n",
        ),
    ],
)
def test_without_its_engine_it_says_what_to_install(
    registry: Registry, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("exo_mesh.engine.registry.load_registry", lambda: registry)
    assert main(["demo", "--engine", "mlx"]) == exit_codes.USAGE
    assert capsys.readouterr().err == message


def test_without_any_engine_it_says_why_each_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look = Availability(False, "MLX has no wheel for glibc 2.31 (it needs 2.35 or newer)", "use another engine")
    registry = Registry({"mlx": Provider(look)}, {})  # type: ignore[dict-item]
    monkeypatch.setattr("exo_mesh.engine.registry.load_registry", lambda: registry)
    assert main(["demo"]) == exit_codes.USAGE
    assert "mlx: MLX has no wheel for glibc 2.31" in capsys.readouterr().err


def test_a_peer_that_fails_is_shown_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("exo_mesh.cli.client.local_mesh.free_port", lambda: 99_999)
    assert main(["demo", "--engine", "dummy", "--once"]) == exit_codes.FAILED
    complaint = capsys.readouterr().err
    assert "a node exited with code 2" in complaint
    assert "--grpc-port 99999: a whole number from 0 to 65535 is needed" in complaint
    log = next(word for word in complaint.split() if word.endswith("node.log:")).removesuffix(":")
    assert Path(log).is_relative_to(tmp_path)
    assert Path(log).is_file()
