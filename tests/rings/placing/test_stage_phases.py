"""How far each stage of an instance is, from its report streams or from the view, and how people see it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from exo_mesh.cli.tables import ring_line
from exo_mesh.domain.reports import InstanceReport
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.placing.stage_phases import LoadPhase, StagePhase, note_phases, of_rank, of_stage
from tests.support.nodes import MODEL, mesh
from tests.support.reports import report_of


@pytest.mark.parametrize(
    ("fetching", "loading", "is_loaded", "is_ready", "text"),
    [
        (None, None, False, False, "planned"),
        ((30, 60), None, False, False, "downloading 50 %"),
        ((60, 60), (2, 8), False, False, "loading 2/8"),
        (None, (0, 0), False, False, "loading"),
        (None, (8, 8), False, False, "warming"),
        (None, (8, 8), True, False, "warming"),
        (None, (8, 8), True, True, "ready"),
    ],
)
def test_a_rank_is_as_far_as_it_has_reported(
    fetching: tuple[int, int] | None, loading: tuple[int, int] | None, is_loaded: bool, is_ready: bool, text: str
) -> None:
    assert of_rank(fetching, loading, is_loaded=is_loaded, is_ready=is_ready).text == text


def test_a_tensor_group_is_as_far_as_its_last_rank() -> None:
    first, last = StagePhase(LoadPhase.LOADING, 1, 8), StagePhase(LoadPhase.LOADING, 7, 8)
    assert of_stage([last, first]) == first
    assert of_stage([StagePhase(LoadPhase.READY), StagePhase(LoadPhase.WARMING)]).phase is LoadPhase.WARMING


def test_of_an_instance_of_another_peer_only_downloads_are_known() -> None:
    download = {"state": "ongoing", "done_bytes": 1, "total_bytes": 4}
    stages = [{"peer": "a", "layers": [0, 6], "downloads": [download]}, {"peer": "b", "layers": [6, 12]}]
    for state, phases, line in (
        ("loading", ["downloading", "loading"], "alpha 0-5 (downloading 25 %) → b 6-11 (loading)"),
        ("ready", ["ready", "ready"], "alpha 0-5 → b 6-11"),
    ):
        shown = report_of(InstanceReport, id="m-1", state=state, stages=stages)
        note_phases(shown, lambda instance_id: ())
        assert [stage.phase for stage in shown.stages] == phases
        assert ring_line(msgspec.to_builtins(shown), {"a": "alpha"}) == line


async def test_the_stages_of_an_instance_go_through_their_phases_in_order(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as (one, _):
        seen: list[list[str]] = [[], []]

        def look() -> None:
            for instance in one.observation.state().view.instances:
                for phases, stage in zip(seen, instance.stages, strict=True):
                    if phases[-1:] != [stage.phase]:
                        phases.append(stage.phase)

        placing = asyncio.ensure_future(one.instances.create(InstanceSpec(MODEL, min_peers=2)))
        while not placing.done():
            look()
            await asyncio.wait([placing], timeout=0.005)
        look()
        order = list(map(str, LoadPhase))
        for phases in seen:
            assert phases[0] == "planned" and phases[-1] == "ready"
            assert phases == sorted(phases, key=order.index)
        assert [stage.progress for stage in placing.result().stages] == ["ready", "ready"]
