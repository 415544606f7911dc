"""While a model loads, no more requests wait for it than may queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from exo_mesh.domain.request import FLEX_PRIORITY, GenerateRequest
from exo_mesh.errors import OverloadError
from exo_mesh.rings.serving.history import History
from exo_mesh.rings.serving.journal import Journal
from tests.support.nodes import a_request, mesh, tokens


@pytest.fixture
def journal() -> Journal:
    return Journal(history=History(max_recent=4))


def test_a_place_in_line_counts_new_requests_for_the_same_model(journal: Journal) -> None:
    def opened(name: str, model: str = "m", **fields: object) -> tuple[GenerateRequest, int]:
        entry = journal.open(replace(a_request(name), **fields), model, 0.0)  # type: ignore[arg-type]
        return entry.request, journal.place_in_line(entry)

    assert [opened(name)[1] for name in "abc"] == [0, 1, 2]
    assert opened("other", "n")[1] == 0
    assert opened("flex", priority=FLEX_PRIORITY)[1] == 0 and opened("flex 2", priority=FLEX_PRIORITY)[1] == 1
    assert [opened(f"choice {n}", share_id="one")[1] for n in range(4)] == [3] * 4, "choices are one request"
    assert opened("d")[1] == 4
    served, moved = (journal.open(a_request(name), "m", 0.0) for name in ("served", "moved"))
    served.instance_id, moved.had_instance = "m-1", True
    assert opened("e")[1] == 5, "they have, or had, an instance"


def test_an_answer_that_goes_on_elsewhere_is_not_new(journal: Journal) -> None:
    """A node that answers the client's idempotency key again has its first tokens, and no instance yet."""
    entry = journal.open(a_request("again"), "m", 0.0)
    assert entry.is_new
    entry.emitted.append(5)
    assert not entry.is_new and journal.place_in_line(journal.open(a_request("next"), "m", 0.0)) == 0


async def test_of_six_requests_for_a_model_that_loads_as_many_wait_as_may_queue(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, max_queued=2) as (node,):
        asked = (tokens(node, a_request(f"r{number}", 3)) for number in range(6))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, OverloadError)]
        assert len(refused) == 4 and [len(one) for one in answers if isinstance(one, list)] == [3, 3]
        assert "2 requests for exo-mesh-demo are waiting already" in str(refused[0]) and refused[0].retry_after_s >= 1
        later = await asyncio.gather(*(tokens(node, a_request(f"s{number}", 3)) for number in range(3)))
        assert all(len(one) == 3 for one in later), "a ring that is up has slots of its own"
