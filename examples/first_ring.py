"""Runs the demo model over two peers of this machine and prints its answer, without HTTP."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from exo_mesh.domain.request import GenerateRequest, SamplingParams, TokenEvent
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.settings.config import Settings
from exo_mesh.text.rendering import CompiledTemplate
from exo_mesh.text.tokenizer import TextModel

MODEL, QUESTION = "exo-mesh-demo", {"role": "user", "content": "Count from 7 to 20."}


async def answer(node: Node) -> None:
    ring = await node.instances.create(InstanceSpec(MODEL, min_peers=2))
    print(*(f"peer {stage.peer[:8]} holds the layers {list(stage.layers)}" for stage in ring.stages), sep="\n")
    text = TextModel.open(await node.models.text_files(MODEL))
    assert text.template is not None, "the demo model has one"
    prompt = text.encode_prompt(CompiledTemplate.compile(text.template.source, MODEL).render([QUESTION]))
    request = GenerateRequest("first", tuple(prompt), 64, SamplingParams(temperature=0), text.eos_ids)
    words = text.detokenizer()
    async for event in node.requests.generate(MODEL, request):
        if isinstance(event, TokenEvent) and event.token_id is not None:
            print(words.push(event.token_id), end="", flush=True)
    print(words.flush())


async def main(home: Path) -> None:
    only_here: dict[str, Any] = {"host": "127.0.0.1", "grpc_port": 0, "discovery": (), "api": False, "engine": "numpy"}
    nodes: list[Node] = []
    try:
        for name in ("alpha", "beta"):
            known = tuple(f"127.0.0.1:{node.grpc_port}" for node in nodes)
            nodes.append(Node(Settings(home=home / name, name=name, bootstrap_peers=known, **only_here)))
            await nodes[-1].start()
        while len(nodes[-1].membership.telemetry) < len(nodes):  # until beta has heard from alpha
            await asyncio.sleep(0.05)
        await answer(nodes[-1])
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))
