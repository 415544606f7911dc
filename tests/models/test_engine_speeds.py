"""The speeds of this machine's engines: measured once, in quiet moments, kept on disk."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

from msgspec import to_builtins
from msgspec.structs import replace

from exo_mesh.domain.device import Device
from exo_mesh.domain.engine_speed import EngineSpeed, ForwardCost
from exo_mesh.domain.model import ModelCard
from exo_mesh.engine.contract import Availability
from exo_mesh.engine.registry import Registry
from exo_mesh.machine.disk import Disk
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.engine_speeds import ROOM_BYTES, EngineSpeeds, SpeedNeeds
from exo_mesh.node.node import Node
from exo_mesh.weights.store import ModelStore
from tests.support.nodes import MODEL, Machine, make_node, until

COST = ForwardCost(0.0, 0.001, 0.002)
SPEED = EngineSpeed(COST, COST, COST, 128)


class Measurable:
    """An engine whose speed the test's own script tells."""

    kind = "stage"

    def __init__(self, name: str, preference: int = 10) -> None:
        self.name = name
        self.build = "1"
        self.preference = preference

    def availability(self) -> Availability:
        return Availability(True, "", preference=self.preference)

    def supports(self, architecture: str) -> bool:
        return True

    def version(self) -> str:
        return self.build


class Rig:
    """EngineSpeeds with its surroundings. The child prints the speed in the file named after the engine, or hangs."""

    def __init__(self, home: Path, node: Node) -> None:
        shipped = resources.files("exo_mesh.weights") / "shipped" / MODEL
        shutil.copytree(str(shipped), home / "models" / "alpha", dirs_exist_ok=True)
        self.home = home
        self.catalogue = Catalogue(ModelStore((home / "models",)), node.membership)
        self.engines = [Measurable("slow"), Measurable("quick"), Measurable("none", -1)]
        self.is_busy = False
        self.room_bytes = ROOM_BYTES
        self.placed: list[tuple[str, str]] = []
        self.num_news = 0

    def says(self, engine: str, factor: float) -> None:
        costs = {name: to_builtins(replace(COST, layer_s=factor * COST.layer_s)) for name in ("one", "eight", "chunk")}
        (self.home / engine).write_text(json.dumps({"speed": {**costs, "chunk_tokens": 128}}))

    @property
    def asked(self) -> list[str]:
        count = self.home / "count"
        return count.read_text().split() if count.is_file() else []

    async def card(self) -> ModelCard:
        await self.catalogue.rescan()
        return await self.catalogue.card("alpha")

    def new(self, *, is_on: bool = True) -> EngineSpeeds:
        script = self.home / "child.py"
        script.write_text(
            "import sys, time, pathlib\n"
            f"home = pathlib.Path({str(self.home)!r})\n"
            "engine = sys.argv[1]\n"
            "open(home / 'count', 'a').write(engine + ' ')\n"
            "answer = home / engine\n"
            "print(answer.read_text()) if answer.is_file() else time.sleep(60)\n"
        )
        registry = Registry({engine.name: engine for engine in self.engines}, {})  # type: ignore[misc]
        return EngineSpeeds(
            registry,
            self.catalogue,
            self.home / "speeds",
            Disk(self.home),
            {},
            is_on=is_on,
            command=(sys.executable, str(script)),
            quiet_s=0.0,
            look_s=0.02,
        )

    @asynccontextmanager
    async def kept(self, speeds: EngineSpeeds) -> AsyncIterator[None]:
        async def news() -> None:
            self.num_news += 1

        def engines_for(model: str, architecture: str) -> tuple[str, ...]:
            return speeds.ordered(model, tuple(engine.name for engine in self.engines))

        device = Device("cpu", "test", (), "")
        needs = SpeedNeeds(
            engines_for, lambda: self.is_busy, lambda: self.room_bytes, lambda: self.placed, lambda: device, news
        )
        keeping = asyncio.create_task(speeds.keep(needs))
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})


@asynccontextmanager
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    node = make_node(tmp_path / "home", "n", Machine())
    try:
        yield Rig(tmp_path, node)
    finally:
        await node.stop()


def measured(speeds: EngineSpeeds, digest: str, count: int) -> Callable[[], bool]:
    return lambda: len(speeds.measured(digest)) == count


async def test_a_placed_model_is_measured_once_and_the_faster_engine_comes_first(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        here.says("slow", 2.0)
        here.says("quick", 1.0)
        card, speeds = await here.card(), here.new()
        here.placed = [("alpha", card.digest)]
        async with here.kept(speeds):
            await until(measured(speeds, card.digest, 2))
            assert speeds.ordered("alpha", ("slow", "quick")) == ("quick", "slow")
            assert speeds.ordered("alpha", ("slow", "quick"), num_chosen=1) == ("slow", "quick"), (
                "the operator's choice"
            )
            assert speeds.ordered("other", ("slow", "quick")) == ("slow", "quick")
            assert here.asked == ["slow", "quick"], "an engine of negative preference is not measured"
            assert [engine for engine, _ in dict(speeds.published())[card.digest[:32]]] == ["quick", "slow"]
        again = here.new()
        async with here.kept(again):
            await until(measured(again, card.digest, 2))
            assert again.ordered("alpha", ("slow", "quick")) == ("quick", "slow")
            assert here.asked == ["slow", "quick"], "kept on disk"
        here.engines[1].build = "2"
        newer = here.new()
        async with here.kept(newer):
            await until(measured(newer, card.digest, 2))
            assert here.asked == ["slow", "quick", "quick"], "another build is measured again"


async def test_a_measurement_ends_when_requests_arrive_and_is_repeated(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        card, speeds = await here.card(), here.new()
        speeds.wish(card)
        async with here.kept(speeds):
            await until(lambda: here.asked == ["slow"])
            here.is_busy = True
            await until(lambda: not speeds.is_measuring)
            assert not speeds.measured(card.digest)
            here.says("slow", 1.0)
            here.says("quick", 1.0)
            here.is_busy = False
            await until(measured(speeds, card.digest, 2))


async def test_nothing_is_measured_without_memory_or_when_it_is_off(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        card, speeds, off = await here.card(), here.new(), here.new(is_on=False)
        here.room_bytes = ROOM_BYTES - 1
        speeds.wish(card)
        off.wish(card)
        async with here.kept(speeds), here.kept(off):
            await until(lambda: card.digest in speeds._later)
        assert not here.asked and not off.published()


async def test_a_measurement_that_other_programs_disturb_is_put_off(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        (tmp_path / "slow").write_text(json.dumps({"disturbed": 0.5}))
        card, speeds = await here.card(), here.new()
        speeds.wish(card)
        async with here.kept(speeds):
            await until(lambda: card.digest in speeds._later)
        assert here.asked == ["slow"] and not speeds.measured(card.digest)


async def test_an_engine_that_fails_comes_last(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        (tmp_path / "slow").write_text(json.dumps({"error": "out of luck"}))
        here.says("quick", 9.0)
        card, speeds = await here.card(), here.new()
        speeds.wish(card)
        async with here.kept(speeds):
            await until(measured(speeds, card.digest, 2))
            assert speeds.measured(card.digest)["slow"] is None
            assert speeds.ordered("alpha", ("slow", "quick")) == ("quick", "slow")


async def test_impossible_figures_of_a_child_or_a_file_are_not_used(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        here.says("slow", -1.0)
        here.says("quick", 1.0)
        (tmp_path / "speeds").mkdir()
        (tmp_path / "speeds" / "x.json").write_text('{"model": 3}')
        card, speeds = await here.card(), here.new()
        speeds.wish(card)
        async with here.kept(speeds):
            await until(measured(speeds, card.digest, 2))
            assert speeds.measured(card.digest)["slow"] is None
