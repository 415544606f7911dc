"""What engines say of a model before they load it: asked once, checked, kept, and told to peers."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from exo_mesh.domain.footprint import POOL_SEQUENCES, POOL_TOKENS, footprint
from exo_mesh.engine.contract import Availability, ModelSurvey
from exo_mesh.engine.registry import Registry, load_registry
from exo_mesh.errors import EngineError, ModelError
from exo_mesh.models.card_json import survey_from_json, survey_to_json
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.surveys import Surveys, as_held
from exo_mesh.node.node import Node
from exo_mesh.weights.store import ModelStore
from tests.support.nodes import MODEL, Machine, make_node

WIDE = ModelSurvey(
    legal_cuts=(2, 5),
    layer_bytes=(1000,) * 8,
    embed_bytes=500,
    head_bytes=700,
    kv_bytes_per_token=(16, 0) * 4,
    kv_fixed_bytes=(0, 4096) * 4,
    layer_kinds=("full", "window") * 4,
)


class Knowing:
    """An engine that says in a child process what it makes of a model: the child is the test's own script."""

    name = "knowing"
    kind = "stage"

    def availability(self) -> Availability:
        return Availability(True, "")

    def supports(self, architecture: str) -> bool:
        return True

    def version(self) -> str:
        return "1.0"

    def create(self) -> None:
        raise NotImplementedError

    def survey(self, model_dir: Path, options: Mapping[str, str]) -> ModelSurvey:
        raise AssertionError("only a child process may be asked")


def script(tmp_path: Path, text: str) -> tuple[str, ...]:
    count = tmp_path / "count"
    file = tmp_path / "child.py"
    file.write_text(f"open({str(count)!r}, 'a').write('x')\n{text}")
    return (sys.executable, str(file))


def saying(tmp_path: Path, answer: dict[str, object]) -> tuple[str, ...]:
    return script(tmp_path, f"print('noise'); print({json.dumps(answer)!r})")


def finder(
    tmp_path: Path, node: Node, command: tuple[str, ...], options: dict[str, str] | None = None
) -> tuple[Surveys, Catalogue]:
    shipped = resources.files("exo_mesh.weights") / "shipped" / MODEL
    shutil.copytree(str(shipped), tmp_path / "models" / "alpha", dirs_exist_ok=True)
    catalogue = Catalogue(ModelStore((tmp_path / "models",)), node.membership)
    registry = Registry({"knowing": Knowing()}, {})  # type: ignore[dict-item]
    surveys = Surveys(registry, catalogue, node.membership, tmp_path / "surveys", command, options=options or {})
    return surveys, catalogue


async def test_an_engine_is_asked_once_and_the_answer_outlives_the_node(tmp_path: Path) -> None:
    node = make_node(tmp_path / "home", "n", Machine())
    command = saying(tmp_path, {"survey": to_builtins(WIDE)})
    surveys, catalogue = finder(tmp_path, node, command)
    card = await catalogue.card("alpha")
    assert [await surveys.of(card, "knowing") for _ in range(2)] == [WIDE, WIDE]
    again, _ = finder(tmp_path, node, command)
    assert await again.of(card, "knowing") == WIDE
    assert (tmp_path / "count").read_text() == "x"
    other, _ = finder(tmp_path, node, saying(tmp_path, {"survey": to_builtins(ModelSurvey((), "loops"))}))
    assert (await other.of(replace(card, digest="other" * 10), "knowing")).legal_cuts == ()
    await node.stop()


async def test_an_engine_is_asked_with_the_options_its_stages_get(tmp_path: Path) -> None:
    """The child answers with as many bytes per layer as dtype= says."""
    node = make_node(tmp_path / "home", "n", Machine())
    answer = to_builtins(replace(WIDE, layer_bytes=(0,) * 8))
    command = script(
        tmp_path,
        f"import json, sys\nanswer = {answer!r}\nsize = int(json.loads(sys.argv[-1]).get('dtype', 7))\n"
        "print(json.dumps({'survey': answer | {'layer_bytes': [size] * 8}}))",
    )
    for options, size in (({}, 7), ({"dtype": "3", "mode": "x"}, 3), ({"mode": "x", "dtype": "3"}, 3)):
        surveys, catalogue = finder(tmp_path, node, command, options)
        card = await catalogue.card("alpha")
        assert (await surveys.of(card, "knowing")).layer_bytes == (size,) * 8
    assert (tmp_path / "count").read_text() == "xx", "the order of options makes no other question"
    await node.stop()


async def test_an_engine_that_cannot_say_is_an_error_here_and_as_the_files_for_planning(tmp_path: Path) -> None:
    node = make_node(tmp_path / "home", "n", Machine())
    surveys, catalogue = finder(tmp_path, node, script(tmp_path, "raise SystemExit('no memory for this')"))
    card = await catalogue.card("alpha")
    with pytest.raises(EngineError, match="no memory for this"):
        await surveys.here(card, "knowing")
    assert as_held(card, await surveys.of(card, "knowing")) == card
    await node.stop()


async def test_an_engine_that_cannot_run_the_model_is_not_asked_again_at_once(tmp_path: Path) -> None:
    node = make_node(tmp_path / "home", "n", Machine())
    surveys, catalogue = finder(tmp_path, node, saying(tmp_path, {"unable": "config.json: rope_type is odd"}))
    card = await catalogue.card("alpha")
    for _ in range(2):
        with pytest.raises(ModelError, match="rope_type is odd"):
            await surveys.of(card, "knowing")
    assert (tmp_path / "count").read_text() == "x"
    await node.stop()


async def test_an_engine_without_opinion_costs_no_process(tmp_path: Path) -> None:
    node = make_node(tmp_path / "home", "n", Machine())
    catalogue = Catalogue(ModelStore(()), node.membership)
    surveys = Surveys(load_registry(), catalogue, node.membership, tmp_path / "surveys", ("no-such-command",))
    card = await catalogue.card(MODEL)
    assert await surveys.of(card, "dummy") == ModelSurvey(card.legal_cuts)
    await node.stop()


def test_the_arithmetic_is_that_of_the_engine() -> None:
    held = as_held(ModelStore(()).card(MODEL), WIDE)
    parts = footprint(held, 0, 3, POOL_TOKENS)
    assert parts.weights_bytes == 3 * 1000 + 500
    assert parts.kv_bytes == 2 * 16 * POOL_TOKENS + 4096 * POOL_SEQUENCES
    assert footprint(held, 5, 8, 512).kv_bytes == 16 * 512 + 2 * 4096, "a tight pool is for one sequence"
    assert footprint(held, 5, 8, 512).weights_bytes == 3 * 1000 + 700


def test_a_survey_survives_the_trip_and_a_broken_one_is_refused() -> None:
    text = survey_to_json(WIDE)
    assert survey_from_json(text, 8) == WIDE
    nonsense = (
        replace(WIDE, legal_cuts=(8,)),
        replace(WIDE, layer_bytes=(1000,) * 7),
        replace(WIDE, layer_bytes=(0,) * 8),
        replace(WIDE, embed_bytes=-1),
        replace(WIDE, kv_fixed_bytes=(2**60,) * 8),
        replace(WIDE, layer_kinds=("a",)),
    )
    for broken in (b"", b"[]", b"{}", text[:-9], *map(survey_to_json, nonsense)):
        with pytest.raises(ModelError):
            survey_from_json(broken, 8)
