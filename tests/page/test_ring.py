"""The picture of the mesh, drawn by the page's own code in Node: as kept, and readable for any number of peers.

UPDATE_SNAPSHOTS=1 writes the kept pictures again; look at them before they are committed.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import combinations
from math import hypot, pi
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from exo_mesh.api.web.live import live_document
from tests.api.scripted_mesh import ScriptedMesh
from tests.page.mesh_fixture import mesh_state
from tests.page.modules import copy_page, needs_node, run_script

SNAPSHOTS = Path(__file__).parent / "snapshots"
pytestmark = needs_node

CASES: dict[str, dict[str, Any]] = {
    "1": {"num_peers": 1},
    "2": {"num_peers": 2},
    "3": {"num_peers": 3},
    "5": {"num_peers": 5},
    "8": {"num_peers": 8},
    "group": {"num_peers": 6, "group": 3},
    "two-of-a-group": {"num_peers": 2, "group": 2},
    "recovering": {"num_peers": 4, "lost": True, "state": "loading"},
    "idle": {"num_peers": 3, "stages": False},
    "fetching": {"num_peers": 3, "state": "loading", "fetched": 0.25},
}
Drawings = dict[tuple[str, bool], str]


@pytest.fixture(scope="module")
def drawings(scripted: ScriptedMesh, tmp_path_factory: pytest.TempPathFactory) -> Drawings:
    """Every case, wide and narrow, by one process of Node."""
    folder = tmp_path_factory.mktemp("page")
    copy_page(folder, "draw_ring.mjs")
    keys = [(name, is_narrow) for name in CASES for is_narrow in (False, True)]
    drawn = run_script(folder, "draw_ring.mjs", [_props(scripted, name, is_narrow) for name, is_narrow in keys])
    return dict(zip(keys, drawn, strict=True))


def _props(scripted: ScriptedMesh, name: str, is_narrow: bool) -> dict[str, Any]:
    mesh = replace(scripted)
    state = mesh_state(**CASES[name])
    mesh.services.observation.state = lambda: state  # type: ignore[method-assign]
    document = live_document(mesh.services.observation, 1.0)
    instance = next(iter(document["instances"].values()), None)
    rate = {"tokens": 20.0, "frames": 22.0} if name == "3" else {"tokens": 0.0, "frames": 0.0}
    chosen = document["node_id"] if name == "5" else ""
    return {"document": document, "instance": instance, "rate": rate, "isNarrow": is_narrow, "chosen": chosen,
            "isRecovering": name == "recovering"}  # fmt: skip


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_picture_is_as_it_was_kept(drawings: Drawings, name: str, is_narrow: bool) -> None:
    kept = SNAPSHOTS / f"ring-{name}-{'narrow' if is_narrow else 'wide'}.svg"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(drawings[name, is_narrow] + "\n")
    assert drawings[name, is_narrow] + "\n" == kept.read_text()


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_peers_stand_apart_and_inside_of_the_picture(drawings: Drawings, name: str, is_narrow: bool) -> None:
    svg = ElementTree.fromstring(drawings[name, is_narrow])
    width, height = (float(value) for value in svg.attrib["viewBox"].split()[2:])
    marks = [(mark, *_place(mark)) for mark in svg.iter("g") if mark.get("role") == "button"]
    assert len(marks) == CASES[name]["num_peers"]
    radii = {mark: float(mark.findall("circle")[0].attrib["r"]) for mark, _, _ in marks}
    for mark, x, y in marks:
        radius = radii[mark]
        assert radius <= x <= width - radius and radius <= y <= height - radius
        for text in mark.findall("text"):
            assert 8 <= y + float(text.attrib["y"]) <= height - 2, "words are within the picture"
    for (mark, x, y), (other, other_x, other_y) in combinations(marks, 2):
        assert hypot(x - other_x, y - other_y) >= radii[mark] + radii[other] + 8


def test_a_tensor_group_is_one_member_and_its_peers_are_ranks(drawings: Drawings) -> None:
    svg = ElementTree.fromstring(drawings["group", False])
    groups = [mark for mark in svg.iter("g") if mark.get("class", "").startswith("group")]
    assert ["".join(mark.itertext()).strip() for mark in groups] == ["tensor group of 3, layers 0–19 · jaccl"]
    assert sum(mark.get("class", "").startswith("hop") for mark in svg.iter("g")) == 3, "three stages, three hops"
    assert drawings["group", False].count(">rank<") == 3


def test_the_picture_says_what_is_wrong_and_what_flows(drawings: Drawings) -> None:
    assert "level-degraded" in drawings["3", False] and 'class="badge"' in drawings["3", False]
    assert 'class="hop flowing flow-3"' in drawings["3", False] and "20.0 tokens/s" in drawings["3", False]
    assert 'class="hop "' in drawings["5", False], "nothing flows there"
    recovering = drawings["recovering", False]
    assert 'class="ring recovering"' in recovering and ">gone<" in recovering
    assert re.search(r'class="peer level-failed holds stage-1 lost', recovering)


def test_peers_are_joined_without_a_model_too_and_a_faster_link_is_thicker(drawings: Drawings) -> None:
    lines = [
        one for one in ElementTree.fromstring(drawings["idle", False]).iter("path") if "link" in one.get("class", "")
    ]
    assert len(lines) == 3, "three peers, three pairs"
    assert 'class="hop' not in drawings["idle", False]
    bench = ElementTree.fromstring(drawings["8", False])
    assert sum("link" in one.get("class", "") for one in bench.iter("path")) == 1, (
        "the idle peer hangs on its neighbour"
    )


def test_circles_grow_with_memory_and_rims_show_layers_in_the_colour_of_their_stage(drawings: Drawings) -> None:
    marks = [one for one in ElementTree.fromstring(drawings["3", False]).iter("g") if one.get("role") == "button"]
    radii = [float(one.findall("circle")[0].attrib["r"]) for one in marks]
    assert radii == sorted(radii, reverse=True) and radii[0] > radii[-1], "192, 128 and 24 GB"
    assert [re.findall(r"stage-\d", one.attrib["class"]) for one in marks] == [["stage-0"], ["stage-1"], ["stage-2"]]
    rims = [next(one for one in mark.iter("circle") if one.get("class") == "rim") for mark in marks]
    for rim, radius, start in zip(rims, radii, (0, 1 / 3, 2 / 3), strict=True):
        length, whole = map(float, rim.attrib["stroke-dasharray"].split())
        assert length == pytest.approx(whole / 3, abs=0.2) and whole == pytest.approx(2 * pi * radius, abs=0.2)
        assert -float(rim.attrib["stroke-dashoffset"]) == pytest.approx(whole * start, abs=0.2)


def test_a_token_is_seen_going_round_only_while_frames_flow(drawings: Drawings) -> None:
    assert drawings["3", False].count('class="token"') == 2 and 'class="token"' not in drawings["5", False]


def test_a_download_is_drawn_at_its_peer(drawings: Drawings) -> None:
    assert drawings["fetching", False].count('class="fetched"') == 1
    assert "downloading 25 %" in drawings["fetching", False]


def _place(mark: ElementTree.Element) -> tuple[float, float]:
    x, y = re.findall(r"-?[\d.]+", mark.attrib["transform"])
    return float(x), float(y)
