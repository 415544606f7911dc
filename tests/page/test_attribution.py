"""Which stages computed an answer, as the page shows it: the route that tells, and the lines under an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exo_mesh.domain.plan import Ballot
from exo_mesh.rings.serving.answer_stages import AnsweredRequest, AnswerLeg, AnswerLegs, AnswerStage
from tests.api.scripted_mesh import Served
from tests.page.modules import call_page, needs_node


def legs_of(*names: str) -> AnswerLegs:
    """One leg, over 18 layers of each of these peers."""
    stages = [AnswerStage((one,), (one,), "dummy", (18 * at, 18 * at + 18), "1") for at, one in enumerate(names)]
    legs = AnswerLegs()
    legs.begin(AnswerLeg("m-1", Ballot(1, "a"), 0, tuple(stages)))
    return legs


async def test_the_api_shows_the_stages_of_a_request_by_each_of_its_ids(api: Served) -> None:
    api.mesh.answered.add(AnsweredRequest("r-1", "m", "", legs_of("alice", "bob")), ("page-1",))
    for name in ("r-1", "page-1"):
        async with api.http.get(f"/v1/requests/{name}/stages") as reply:
            found = await reply.json()
        assert (found["request_id"], found["model"]) == ("r-1", "m")
        assert [one["names"] for one in found["legs"][0]["stages"]] == [["alice"], ["bob"]]
    async with api.http.get("/v1/requests/r-2/stages") as reply:
        assert reply.status == 404


def stage(name: str, start: int, stop: int, *, is_new: bool = False) -> dict[str, Any]:
    return {"peers": [name], "names": [name], "engine": "dummy", "layers": [start, stop], "is_new": is_new}


def leg(*stages: dict[str, Any], pause_s: float | None = None) -> dict[str, Any]:
    return {"instance": "m-1", "from_token": 0, "pause_s": pause_s, "stages": list(stages)}


ALICE, BOB = stage("alice", 0, 18), stage("bob", 18, 36)
FIRST = leg(ALICE, BOB)
STORIES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "nothing happened": ([FIRST], []),
    "a spare took over": (
        [FIRST, leg(ALICE, stage("carol", 18, 36, is_new=True), pause_s=1.9)],
        ["bob stopped; carol took over layers 18–35 after 1.9 s"],
    ),
    "a neighbour absorbed the layers": (
        [FIRST, leg(stage("alice", 0, 36, is_new=True), pause_s=0.25)],
        ["bob stopped; alice took over layers 18–35 after 250 ms"],
    ),
    "two took over, one of them a single layer": (
        [FIRST, leg(stage("alice", 0, 19, is_new=True), stage("carol", 19, 36, is_new=True), pause_s=2)],
        ["bob stopped; alice took over layer 18, carol took over layers 19–35 after 2.0 s"],
    ),
    "a process was started again": (
        [FIRST, leg(ALICE, stage("bob", 18, 36, is_new=True), pause_s=3)],
        ["bob was started again and computes layers 18–35 after 3.0 s"],
    ),
    "a machine joined": (
        [FIRST, leg(stage("alice", 0, 12, is_new=True), stage("dave", 12, 18, is_new=True), BOB)],
        ["dave took over layers 12–17"],
    ),
    "the same ring": ([FIRST, FIRST], []),
}


@needs_node
def test_each_takeover_is_texts_in_one_sentence(tmp_path: Path) -> None:
    changes = call_page(tmp_path / "a", [("who_computed", "takeovers", [legs]) for legs, _ in STORIES.values()])
    flat = [(one, change) for one, found in zip(STORIES, changes, strict=True) for change in found]
    texts = call_page(tmp_path / "b", [("who_computed", "sentence", [change]) for _, change in flat])
    for name, (_, expected) in STORIES.items():
        assert [text for (one, _), text in zip(flat, texts, strict=True) if one == name] == expected, name


@needs_node
def test_legs_of_a_second_entry_peer_come_after_those_of_the_first(tmp_path: Path) -> None:
    """The new entry peer knows only its own legs, so the page compares the stages."""
    moved = leg(ALICE, stage("carol", 18, 36))
    later = leg(ALICE, stage("carol", 18, 36, is_new=True), pause_s=2)
    pairs = [([FIRST], [FIRST]), ([FIRST], [moved]), ([FIRST], []), ([], [FIRST])]
    same, other, none, first = call_page(tmp_path, [("who_computed", "joined", [*pair, 4]) for pair in pairs])
    assert same == none == first == [FIRST]
    assert other == [FIRST, {**later, "pause_s": 4}]


@needs_node
def test_a_takeover_is_texts_in_german(tmp_path: Path) -> None:
    change = {"lost": ["bob"], "took": [{"name": "carol", "layers": [18, 36]}], "restarted": [], "pause_s": 1.9}
    entry = {**change, "entry": {"left": "alice", "next": "carol"}}
    calls = [("who_computed", "sentence", given) for given in ([change], [change, ["bob"]], [entry])]
    assert call_page(tmp_path, calls, "de") == [
        "bob ist ausgefallen; carol übernahm Schichten 18–35 nach 1,9 s",
        "bob läuft leer; carol übernahm Schichten 18–35 nach 1,9 s",
        "alice ist ausgefallen; carol sendet den Rest der Antwort nach 1,9 s",
    ]


NAMES = {name: name for name in ("alice", "bob", "carol")}


def document(time: float, state: str, counter: int, peers: str, *stages: tuple[str, int, int, int]) -> dict[str, Any]:
    """A live document: stages are (peer, start, stop, pid)."""
    rings = [{"peer": name, "layers": [start, stop], "pid": pid} for name, start, stop, pid in stages]
    instance = {"id": "m-1", "model": "m", "state": state, "ballot": [counter, "a"], "stages": rings}
    return {"time": time, "peers": {name: {"name": name} for name in peers.split()}, "instances": {"m-1": instance}}


@needs_node
def test_the_events_of_the_mesh_tell_who_took_over_and_how_long_it_took(tmp_path: Path) -> None:
    before = document(1, "ready", 1, "alice carol", ("alice", 0, 18, 1), ("bob", 18, 36, 2))
    during = document(2, "loading", 2, "alice carol", ("alice", 0, 18, 1), ("carol", 18, 36, 3))
    after = document(5, "ready", 2, "alice carol", ("alice", 0, 18, 1), ("carol", 18, 36, 3))
    gone = {**during, "peers": after["peers"]}
    (events,) = call_page(tmp_path / "a", [("changes", "withChanges", [[], before, during, NAMES])])
    adopted = document(9, "ready", 3, "alice carol", ("alice", 0, 18, 1), ("carol", 18, 36, 3))
    slow, fast, restarted, same = call_page(
        tmp_path / "b",
        [
            ("changes", "withChanges", [events, gone, after, NAMES]),
            ("changes", "withChanges", [[], before, after, NAMES]),
            ("changes", "withChanges", [[], after, {**adopted, "instances": restart(adopted)}]),
            ("changes", "withChanges", [[], after, adopted]),
        ],
    )
    assert [one["kind"] for one in slow] == ["recovering", "recovered"]
    (change,) = slow[-1]["changes"]
    took = [{"name": "carol", "layers": [18, 36]}]
    assert (change["lost"], change["took"], change["pause_s"]) == (["bob"], took, 3)
    assert fast[-1]["changes"][0]["took"] == took, "also if the page never saw that it was loading"
    assert restarted[-1]["changes"][0]["restarted"] == took
    assert same == [], "a ring with another owner has lost nothing"


def restart(live: dict[str, Any]) -> dict[str, Any]:
    """The instance with another process in its last stage."""
    instance = live["instances"]["m-1"]
    return {"m-1": {**instance, "stages": [instance["stages"][0], {**instance["stages"][1], "pid": 9}]}}


@needs_node
def test_only_text_from_another_node_means_that_the_entry_peer_stopped(tmp_path: Path) -> None:
    """The page may leave its node for the live data while the answer still comes from there."""

    def grown(text: str, base: str) -> tuple[str, str, list[Any]]:
        return ("attribution", "workOf", ["r", {"text": text, "reasoning": "", "base": base}, None])

    known = call_page(
        tmp_path, [grown("a", "http://a"), grown("ab", "http://a"), grown("a", "http://b"), grown("abc", "http://b")]
    )
    assert known[:3] == [None, None, None], "the shorter text of the other node is not shown yet"
    (entry,) = known[3]["changes"]
    assert entry["entry"] == {"left": "a", "next": "b"} and entry["pause_s"] >= 0
