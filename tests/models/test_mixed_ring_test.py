"""Before engines share a ring they are tried, once: real child processes that say what the test wants of them."""

from __future__ import annotations

import base64
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.ring_candidates import Candidate
from exo_mesh.domain.stage import LoadOutcome, StageReady
from exo_mesh.domain.tensor import TensorSpec
from exo_mesh.engine.contract import Availability
from exo_mesh.engine.registry import Registry
from exo_mesh.errors import EngineError, InputError, ModelError
from exo_mesh.mesh.membership.port import Calls
from exo_mesh.models import calls, selftests
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.mixed_ring_test import MixedRingTest
from exo_mesh.models.selftests import SelfTests
from exo_mesh.models.surveys import Surveys
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.ring_monitor import refuse_mismatch
from exo_mesh.weights.store import ModelStore
from exo_mesh.wire.peer_call import answer
from tests.domain.test_mixed_plans import peers, placed
from tests.support.nodes import GB, MODEL, Machine, make_node


class Able:
    """An engine that runs everything, without a survey of its own."""

    kind = "stage"

    def __init__(self, name: str) -> None:
        self.name = name

    def availability(self) -> Availability:
        return Availability(True, "")

    def supports(self, architecture: str) -> bool:
        return True

    def version(self) -> str:
        return "1"

    def create(self) -> None:
        raise NotImplementedError


def answer_of(value: float, native: str, ranges: list[list[int]]) -> dict[str, Any]:
    values = base64.b64encode(np.array([1.0, value, -1.0], "<f4").tobytes()).decode()
    results = [{"range": part, "outputs": {"hidden": values}, "inputs": [], "given": []} for part in ranges]
    return {"version": "1", "native_dtype": native, "results": results}


class Bench:
    """The parts under test on one node; `answers` are what the child process says for each engine."""

    def __init__(self, tmp_path: Path, node: Node, answers: dict[str, dict[str, Any]]) -> None:
        self.count = tmp_path / "count"
        script = tmp_path / "child.py"
        script.write_text(
            f"import sys, json\nopen({str(self.count)!r}, 'a').write(sys.argv[1])\n"
            f"print(json.dumps({answers!r}[sys.argv[1]]))"
        )
        catalogue = Catalogue(ModelStore(()), node.membership)
        registry = Registry({name: Able(name) for name in "abc"}, {})  # type: ignore[misc]
        surveys = Surveys(registry, catalogue, node.membership, tmp_path / "surveys", ("none",))
        command = (sys.executable, str(script))
        self.tests = SelfTests(registry, catalogue, {}, tmp_path / "scratch", command)
        rows = [answer(calls.SELF_TEST, partial(calls.answer_self_test, self.tests.run))]
        mesh: Any = SimpleNamespace(
            own=node.membership.own,
            peer=node.membership.peer,
            calls=Calls(node.node_id, lambda peer_id: None, lambda: rows),
        )
        self.mixing = MixedRingTest(mesh, surveys, tmp_path / "verdicts")
        self.ring = [Candidate(node.node_id, GB, engine) for engine in answers]

    @property
    def asked(self) -> str:
        return self.count.read_text() if self.count.exists() else ""


@pytest.fixture
def card() -> ModelCard:
    return ModelStore(()).card(MODEL)


async def test_engines_that_agree_are_tried_once_and_the_verdict_outlives_the_node(
    tmp_path: Path, card: ModelCard
) -> None:
    node = make_node(tmp_path / "home", "n", Machine())
    ends = [[0, 1], [7, 8]]
    answers = {"a": answer_of(2.0, "bfloat16", ends), "b": answer_of(2.00001, "float32", ends)}
    bench = Bench(tmp_path, node, answers)
    for _ in range(2):
        outcome = await bench.mixing.of(card, bench.ring)
        assert outcome.activation_dtype == "float32" and not outcome.unmixable
    again = Bench(tmp_path, node, answers)
    assert (await again.mixing.of(card, again.ring[::-1])).activation_dtype == "float32"
    assert sorted(bench.asked) == ["a", "b"]
    await node.stop()


async def test_engines_that_differ_are_refused_with_the_measured_difference(tmp_path: Path, card: ModelCard) -> None:
    node = make_node(tmp_path / "home", "n", Machine())
    ends = [[0, 1], [7, 8]]
    answers = {name: answer_of(value, "float32", ends) for name, value in (("a", 2.0), ("b", 2.0), ("c", 2.5))}
    bench = Bench(tmp_path, node, answers)
    outcome = await bench.mixing.of(card, bench.ring)
    assert set(outcome.unmixable) == {frozenset("ac"), frozenset("bc")}
    assert "a and c differ by 3.0e-01 of the root mean square in layer 0" in outcome.unmixable[frozenset("ac")]
    await node.stop()


async def test_a_self_test_that_fails_stands_in_the_way_but_is_not_kept(tmp_path: Path, card: ModelCard) -> None:
    node = make_node(tmp_path / "home", "n", Machine())
    ends = [[0, 1], [7, 8]]
    broken = {"error": "out of memory", "code": "engine_error"}
    bench = Bench(tmp_path, node, {"a": answer_of(1.0, "float32", ends), "b": broken})
    for _ in range(2):
        (reason,) = (await bench.mixing.of(card, bench.ring)).unmixable.values()
        assert "could not be compared" in reason and "out of memory" in reason
    assert sorted(bench.asked) == ["a", "b"], "it is not tried again at once"
    assert not list((tmp_path / "verdicts").glob("*"))
    await node.stop()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"digest": "0" * 64}, ModelError, "not the requested 000000000000"),
        ({"ranges": []}, InputError, "1 to 8 layer ranges"),
        ({"ranges": [(0, 9)]}, InputError, "layer ranges"),
        ({"ranges": [(3, 3)]}, InputError, "layer ranges"),
        ({"ranges": [(0, 1)] * 9}, InputError, "layer ranges"),
        ({"engine": "none"}, EngineError, "cannot run here"),
        ({"engine": "b"}, EngineError, "cannot be read"),
        ({"engine": "c"}, EngineError, "KeyError"),
    ],
)
async def test_what_a_peer_asks_is_checked_and_so_is_what_the_child_says(
    tmp_path: Path, card: ModelCard, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    node = make_node(tmp_path / "home", "n", Machine())
    bench = Bench(tmp_path, node, {"b": {"version": "1", "native_dtype": "", "results": [{"range": [0]}]}})
    asked = {"model": MODEL, "digest": card.digest, "engine": "a", "ranges": [(0, 1)], **change}
    with pytest.raises(error, match=message):
        await bench.tests.run(**asked)
    await node.stop()


async def test_a_flood_of_self_tests_is_refused(
    tmp_path: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node(tmp_path / "home", "n", Machine())
    bench = Bench(tmp_path, node, {"a": answer_of(1.0, "float32", [[0, 1]])})
    monkeypatch.setattr(selftests, "MAX_WAITING", 0)
    with pytest.raises(EngineError, match="self-tests wait here already"):
        await bench.tests.run(MODEL, card.digest, "a", [(0, 1)])
    assert not bench.asked
    await node.stop()


def mixed_plan() -> Plan:
    return placed(peers((64, "mlx"), (64, "torch")), mixing="always")


def ready(inputs: list[tuple[str, int]], outputs: list[tuple[str, int]]) -> StageReady:
    def specs(tensors: list[tuple[str, int]]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, "float32", (width,)) for name, width in tensors)

    return StageReady(LoadOutcome(inputs=specs(inputs), outputs=specs(outputs)))


def test_stages_that_do_not_fit_together_are_refused_with_both_named() -> None:
    plan = mixed_plan()
    hidden, more = [("hidden", 64)], [("hidden", 64), ("v_first", 64)]
    refuse_mismatch(plan, [ready([], hidden), ready(hidden, [])])
    refuse_mismatch(plan, [ready([], []), ready(more, [])])
    with pytest.raises(EngineError, match=r"mlx at p0\) and .*torch at p1\).* takes .*v_first"):
        refuse_mismatch(plan, [ready([], hidden), ready(more, [])])
