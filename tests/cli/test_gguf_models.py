"""`exo-mesh run REPO:QUANT`, on two real nodes that ask a hub on the loopback."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli.client.child_node import ChildNode, running_node
from exo_mesh.cli.verbs.run import _with_directory
from exo_mesh.engine.registry import load_registry
from tests.support.hub import LoopbackHub
from tests.support.processes import clean_environ, eventually, run

pytest.importorskip("gguf")

from tests.support.gguf_twin import write_gguf_twin

pytestmark = pytest.mark.extended

NAME = "org/demo-GGUF:Q8_0"
FLAGS = ["--host", "127.0.0.1", "--grpc-port", "0", "--api-port", "0", "--discovery", "none", "--engine", "numpy",
         "--min-peers", "2"]  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    demo = Path(str(resources.files("exo_mesh.weights") / "shipped" / "exo-mesh-demo"))
    (tmp_path / "gguf").mkdir()
    write_gguf_twin(demo, tmp_path / "gguf" / "demo-Q8_0.gguf", "Q8_0")
    write_gguf_twin(demo, tmp_path / "gguf" / "demo-F16.gguf", "F16")
    shutil.copy(demo / "tokenizer.json", tmp_path / "gguf")  # it cuts words by rules of its own
    with LoopbackHub() as hub:
        hub.add("org/demo-GGUF", tmp_path / "gguf")
        yield hub


def test_a_file_answers_by_its_path(tmp_path: Path, hub: LoopbackHub) -> None:
    home, file = tmp_path / "home", tmp_path / "gguf" / "demo-F16.gguf"
    home.mkdir()
    assert _with_directory({}, str(file)) == {"models_dir": [str(file.parent)]}, "for a node that run itself starts"
    flags = ["--name", "alpha", *FLAGS[:-2], "--models-dir", str(file.parent)]
    with running_node(home, flags, clean_environ(home)) as node:
        here = ["--api-url", node.ready["api_url"]]
        asked = run(["run", str(file), "Count from 7 to 12.", *here], home)
        assert asked.stdout == "7, 8, 9, 10, 11, 12\n", asked.stderr


@pytest.mark.parametrize("engine", ["numpy", "llamacpp"])
def test_a_quantisation_of_the_hub_answers_over_two_peers_and_its_bytes_come_once(
    tmp_path: Path, hub: LoopbackHub, engine: str
) -> None:
    if engine not in load_registry().providers or not load_registry().provider(engine).availability().available:
        pytest.skip(f"the engine {engine} cannot run here")
    homes = [tmp_path / name for name in ("alpha", "beta")]
    size = (tmp_path / "gguf" / "demo-Q8_0.gguf").stat().st_size
    with ExitStack() as stack:
        ready: list[dict[str, str]] = []
        for home in homes:
            home.mkdir()
            environ = {**clean_environ(home), **hub.environment, "HF_HOME": str(home / "hf")}
            joins = ["--bootstrap-peers", ready[0]["grpc_address"]] if ready else []
            node = ChildNode(["--name", home.name, *FLAGS, "--engine", engine, *joins], home / "log", environ)
            stack.callback(node.stop)
            ready.append(node.wait_ready(60))
        here = ["--api-url", ready[0]["api_url"]]

        def state() -> Any:
            with urllib.request.urlopen(f"{ready[0]['api_url']}/state", timeout=10) as reply:
                return json.load(reply)["view"]

        assert eventually(lambda: len(state()["peers"]) == 2)
        shown = run(["show", NAME, *here], homes[0]).stdout
        assert "org/demo-GGUF-Q8_0" in shown and "8 layers" in shown, "before any weights are here"
        asked = run(["run", NAME, "Count from 7 to 12.", *here], homes[0])
        assert asked.stdout == "7, 8, 9, 10, 11, 12\n", asked.stderr
        (instance,) = state()["instances"]
        assert len({stage["peer"] for stage in instance["stages"]}) == 2
        assert size <= hub.sent_of("demo-Q8_0.gguf") <= 1.05 * size and not hub.sent_of("demo-F16.gguf")
        assert "org/demo-GGUF-Q8_0" in run(["list", *here], homes[0]).stdout
        pulled = run(["pull", NAME, "--whole", "--json", *here], homes[0])
        assert [entry["state"] for entry in json.loads(pulled.stdout)] == ["completed"]
        (found,) = homes[0].rglob("demo-Q8_0.gguf")
        assert found.read_bytes() == (tmp_path / "gguf" / "demo-Q8_0.gguf").read_bytes()
        assert hub.sent_of("demo-Q8_0.gguf") <= 1.05 * size, "the other peer had the rest"
