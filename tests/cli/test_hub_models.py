"""The verbs around models, on a real node that asks a hub on the loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.child_node import running_node
from tests.cli.closed_port import closed_port
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.hub import LoopbackHub
from tests.support.processes import clean_environ, eventually, run, run_in, start

pytestmark = pytest.mark.extended

DEMO = "org/demo"
FLAGS = ["--name", "alpha", "--host", "127.0.0.1", "--grpc-port", "0", "--api-port", "0", "--discovery", "none",
         "--engine", "numpy"]  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    """The demo model under an id of the hub, and one that takes a token."""
    with LoopbackHub() as hub:
        hub.add(DEMO, Path(str(resources.files("exo_mesh.weights") / "shipped" / "exo-mesh-demo")))
        tiny = write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", TinyModel())
        hub.add("org/gated", tiny, gated="manual")
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def environ(hub: LoopbackHub, home: Path) -> dict[str, str]:
    return {**clean_environ(home), **hub.environment, "HF_HOME": str(home / "hf")}


def test_a_model_of_the_hub_answers_and_is_listed_and_deleted(
    hub: LoopbackHub, environ: dict[str, str], home: Path
) -> None:
    home.mkdir()
    with running_node(home, FLAGS, environ) as node:
        here = ["--api-url", node.ready["api_url"]]
        shown = run(["show", DEMO, *here], home).stdout
        assert "6.6 MB in 8 layers" in shown and "fits       yes: 1 peer" in shown, "before any weights are here"
        found = run(["search", "demo", *here], home).stdout
        assert DEMO in found and "yes, 1 peer" in found
        hub.faults.hold.set()
        with start(["run", DEMO, "Count from 7 to 12.", *here], home) as asked:
            assert asked.stderr is not None
            assert asked.stderr.readline() == "alpha: org/demo, layers 0-7: 1 % of 6.6 MB\n"
            hub.faults.hold.clear()
            assert asked.communicate(timeout=60)[0] == "7, 8, 9, 10, 11, 12\n"
        pulled = run(["pull", DEMO, "--json", *here], home)
        assert [entry["state"] for entry in json.loads(pulled.stdout)] == ["completed"]
        in_use = run(["rm", DEMO, *here], home)
        assert (in_use.returncode, in_use.stderr.count("in use")) == (exit_codes.FAILED, 1)
        run(["stop", DEMO, *here], home)
        assert eventually(lambda: run(["rm", DEMO, *here], home).stdout == f"deleted {DEMO} from alpha; 6.6 MB freed\n")
        assert DEMO not in run(["list", *here], home).stdout
        for name, complaint in (("org/gated", "set HF_TOKEN"), ("org/none", 'there is no model "org/none"')):
            refused = run(["run", name, "Hi", *here], home)
            assert (refused.returncode, refused.stdout) == (exit_codes.FAILED, "") and complaint in refused.stderr
        stranger = run(["run", DEMO, "Hi", *here], home / "other")
        assert stranger.returncode == exit_codes.FAILED and "Downloading a model needs local rights" in stranger.stderr


def test_offline_the_hub_is_not_asked(hub: LoopbackHub, environ: dict[str, str]) -> None:
    asked = sum(hub.requests.values())
    environ = {**environ, "EXO_MESH_API_PORT": str(closed_port())}  # where no node of another program answers
    done = run_in(environ, ["run", DEMO, "Hi", "--offline", *FLAGS])
    assert (done.returncode, done.stdout) == (exit_codes.FAILED, "")
    assert f"offline, so only peers can provide {DEMO}" in done.stderr
    assert sum(hub.requests.values()) == asked
