"""A GGUF model runs over several peers like any other: from a directory, from a peer, and from a hub by its name and
quantisation, with the answers of the checkpoint that it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_mesh.rings.placing.spec import InstanceSpec
from tests.meshes.test_fetching import delete_all, knows, manifest_of, nodes_at
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.hub import LoopbackHub
from tests.support.nodes import a_request, tokens

pytest.importorskip("gguf")

from tests.support.gguf_twin import write_gguf_twin

pytestmark = pytest.mark.extended

MODEL = TinyModel(layers=6, hidden=128)
LARGER = TinyModel(layers=6, hidden=256, intermediate=1024)
"""With Q8_0 six times as large as the first read of a header."""


async def test_a_gguf_file_in_a_directory_runs_over_peers_that_copy_their_layers(tmp_path: Path) -> None:
    origin = write_checkpoint(tmp_path / "models" / "origin", MODEL)
    write_gguf_twin(origin, tmp_path / "models" / "twin-F32.gguf")
    async with nodes_at(tmp_path, "ab", holder_dir=tmp_path / "models", secret=32 * "5") as nodes:
        a, b = nodes
        await knows(nodes, "twin-F32")
        expected = await tokens(a, a_request("alone", 24), "origin")
        await delete_all(a)
        placed = await b.instances.create(InstanceSpec("twin-F32", min_peers=2))
        assert {stage.peer for stage in placed.stages} == {a.node_id, b.node_id}
        assert (await b.models.find("twin:f32", may_download=False)).name == "twin-F32"
        assert await tokens(b, a_request("split", 24), "twin-F32") == expected
        manifest = manifest_of(tmp_path, "b", "twin-F32")
        (file,) = manifest.files.values()
        assert not manifest.is_whole and 0.3 * file.size < manifest.present_bytes < 0.9 * file.size


async def test_a_name_with_a_quantisation_runs_from_the_hub_over_two_peers_and_each_byte_comes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = write_checkpoint(tmp_path / "origin", LARGER, repeat=True)
    (tmp_path / "gguf").mkdir()
    file = write_gguf_twin(origin, tmp_path / "gguf" / "tiny-Q8_0.gguf", "Q8_0")
    write_gguf_twin(origin, tmp_path / "gguf" / "tiny-F16.gguf", "F16")
    with LoopbackHub() as hub:
        hub.add("org/tiny-GGUF", tmp_path / "gguf")
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        async with nodes_at(tmp_path, "ab") as (a, b):
            card = await a.models.find("org/tiny-GGUF:q8_0", may_download=True)
            assert card.name == "org/tiny-GGUF-Q8_0" and card.num_layers == 6
            placed = await a.instances.create(InstanceSpec(card.name, min_peers=2))
            assert {stage.peer for stage in placed.stages} == {a.node_id, b.node_id}
            split = await tokens(b, a_request("split", 24), card.name)
            size = file.stat().st_size
            assert hub.sent_of("tiny-Q8_0.gguf") <= 1.05 * size and not hub.sent_of("tiny-F16.gguf")
            assert all(manifest_of(tmp_path, name, card.name).present_bytes < 0.9 * size for name in "ab")
            await delete_all(a)
            await a.instances.create(InstanceSpec(card.name))
            assert await tokens(a, a_request("whole", 24), card.name) == split
