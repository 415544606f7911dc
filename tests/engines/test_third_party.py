"""Somebody else's engine, in a package of its own, installed from its wheel: found, checked by the suite, and used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from exo_mesh.weights.safetensors import read_tensor_table
from tests.support.installs import ROOT, build_wheel, install
from tests.support.peers import mesh, text_of
from tests.support.processes import run

EXAMPLE = ROOT / "examples" / "exo-mesh-engine-example"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The example's wheel, installed; every process that is started meanwhile finds it."""
    wheel = build_wheel(EXAMPLE, tmp_path_factory.mktemp("build"))
    directory = install(wheel, tmp_path_factory.mktemp("site"))
    with pytest.MonkeyPatch.context() as patch:
        before = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", os.pathsep.join([*([before] if before else []), str(directory)]))
        yield directory


def test_it_is_found_by_its_entry_point(site: Path, tmp_path: Path) -> None:
    listed = {engine["name"]: engine for engine in json.loads(run(["engines", "--json"], tmp_path).stdout)}
    assert listed["example"]["available"]
    assert not listed["example"]["chosen"], "its preference is negative"
    assert "dummy" in listed


@pytest.mark.extended
def test_it_passes_the_suite_of_every_engine(site: Path, tmp_path: Path) -> None:
    tests = tmp_path / "test_conformance.py"
    tests.write_bytes((EXAMPLE / "tests" / "test_conformance.py").read_bytes())
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        "--rootdir",
        str(tmp_path),
    ]
    done = subprocess.run([*command, str(tests)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 40, done.stdout[-400:]


def plain_loop(model_dir: Path, prompt: str, num_tokens: int) -> str:
    """What the model says, by four lines of NumPy on its files."""
    table = read_tensor_table(model_dir)
    weights = {
        name: np.fromfile(info.file, np.float32, info.num_bytes // 4, offset=info.start).reshape(info.shape)
        for name, info in table.items()
    }
    ids = [int(i) for i in Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(prompt).ids]
    layers = [weights[f"layers.{index}.mix.weight"] for index in range(4)]
    for _ in range(num_tokens):
        x = weights["embed_tokens.weight"][ids[-1]]
        for layer in layers:
            x = x + np.tanh(layer @ x)
        ids.append(int((weights["lm_head.weight"] @ x).argmax()))
    return str(Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode(ids[-num_tokens:]))


@pytest.mark.extended
def test_a_mesh_of_two_nodes_serves_its_model(site: Path, tmp_path: Path) -> None:
    model_dir = tmp_path / "models" / "bigram"
    subprocess.run([sys.executable, "-m", "exo_mesh_engine_example", str(model_dir)], check=True, timeout=60)
    flags = ["--min-peers", "2", "--models-dir", str(model_dir.parent)]
    with mesh(tmp_path / "mesh", [flags] * 2, engine="example") as peers:
        stages = peers[0].place(model="bigram")["stages"]
        assert {stage["peer"] for stage in stages} == {peer.id for peer in peers}
        assert {stage["engine"] for stage in stages} == {"example"}
        reply = peers[1].chat("abc", model="bigram", max_tokens=12)
        assert text_of(reply) == plain_loop(model_dir, "abc", 12)
        assert reply["usage"]["completion_tokens"] == 12
