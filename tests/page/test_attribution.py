"""Which stages computed an answer, as the page shows it: the route that tells, and the lines under an answer."""

from __future__ import annotations

from exo_mesh.domain.plan import Ballot
from exo_mesh.rings.serving.answer_stages import AnsweredRequest, AnswerLeg, AnswerLegs, AnswerStage
from tests.api.scripted_mesh import Served


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
