"""Stored responses: continued, read, listed, streamed again, deleted, and only by those who may."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.rings.serving.kept_answers import KeptAnswers
from exo_mesh.rings.serving.streams import StreamViewer
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role, new_key
from tests.api.openai.test_streams import Gate
from tests.api.openai.test_tools import CALL
from tests.api.responses.conftest import Asking, Json, events_of
from tests.api.responses.test_replies import ANSWERS, GROUP, PATCH, TOOL, rebuilt
from tests.api.scripted_mesh import ScriptedMesh, served

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)


@pytest.fixture
async def open_asking(thinking_model: Path) -> AsyncIterator[Asking]:
    """Nobody has the rights of an admin."""
    async with served(ScriptedMesh(thinking_model, limit=4096), ApiOptions(access=AccessPolicy())) as server:
        yield Asking(server)


async def test_a_response_continues_the_conversation_before_it(asking: Asking) -> None:
    asking.mesh.answer = f"<think>hm</think>\n\nOne moment.{CALL}"
    first = await asking.response(input="Weather?", instructions="Be brief.", tools=[TOOL])
    call_id = first["output"][-1]["call_id"]
    asking.mesh.answer = "Blue."
    output = {"type": "function_call_output", "call_id": call_id, "output": "sun"}
    second = await asking.response(input=[output], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    await asking.response(input="And now?", previous_response_id=second["id"], instructions="Be long.")
    prompt = asking.prompt()
    places = [prompt.index(word) for word in ("Be long.", "Weather?", "One moment.", "sun", "Blue.", "And now?")]
    assert places == sorted(places) and "Be brief." not in prompt


async def test_items_are_referred_to_by_their_ids(asking: Asking) -> None:
    asking.mesh.answer = CALL
    first = await asking.response(input="Weather?", tools=[TOOL])
    (call,) = first["output"]
    status, listed = await asking.call("GET", f"/v1/responses/{first['id']}/input_items")
    assert status == 200
    references = [{"type": "item_reference", "id": listed["data"][0]["id"]}, {"id": call["id"]}]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    asking.mesh.answer = "Blue."
    second = await asking.response(input=[*references, output])
    assert "Weather?" in asking.prompt() and '"Rome"' in asking.prompt()
    status, listed = await asking.call("GET", f"/v1/responses/{second['id']}/input_items?order=asc")
    assert [item["type"] for item in listed["data"]] == ["message", "function_call", "function_call_output"]


async def test_a_response_is_read_as_it_was(asking: Asking) -> None:
    response = await asking.response(metadata={"a": "b"})
    path = f"/v1/responses/{response['id']}"
    assert await asking.call("GET", path) == (200, response)
    assert await asking.call("GET", f"{path}?include=x") == (200, response)
    deleted = {"id": response["id"], "object": "response", "deleted": True}
    assert await asking.call("DELETE", path) == (200, deleted)
    for method in ("GET", "DELETE"):
        status, body = await asking.call(method, path)
        assert (status, body["error"]["code"]) == (404, "response_not_found")
    status, _, message = await asking.refusal(previous_response_id=response["id"])
    assert status == 404 and response["id"] in message


async def test_nothing_is_kept_of_a_request_that_says_so(asking: Asking) -> None:
    response = await asking.response(store=False)
    assert response["store"] is False and len(asking.mesh.answers) == 0
    assert (await asking.call("GET", f"/v1/responses/{response['id']}"))[0] == 404


async def test_a_node_that_keeps_nothing_says_so(asking: Asking) -> None:
    asking.mesh.answers = KeptAnswers(0, lambda: 0.0)
    response = await asking.response(store=True)
    assert response["store"] is False and len(asking.mesh.answers) == 0


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("fields", [{}, {"reasoning": {"summary": "auto"}}, {"top_logprobs": 1}])
async def test_the_stream_of_a_stored_response_is_the_same_again(asking: Asking, answer: str, fields: Json) -> None:
    asking.mesh.answer = ANSWERS[answer]
    events = await asking.events(tools=[TOOL, PATCH, GROUP], include=["reasoning.encrypted_content"], **fields)
    path = f"/v1/responses/{events[0]['response']['id']}?stream=true"
    for after in (-1, 0, len(events) // 2, len(events)):
        async with asking.api.http.get(path + (f"&starting_after={after}" if after >= 0 else "")) as reply:
            assert reply.status == 200
            assert events_of(await reply.text()) == events[after + 1 :]


async def test_a_running_response_is_read_from_any_event_on(open_asking: Asking) -> None:
    gate = Gate(open_asking.mesh)
    http = open_asking.api.http
    gate.let(2)
    async with http.post("/v1/responses", json={"input": "Hi", "stream": True, "store": False}) as own:
        (found,) = open_asking.mesh.live.find(StreamViewer(None), "", "peer1")
        path = f"/v1/responses/{found.id}"
        status, running = await open_asking.call("GET", path)
        assert (status, running["status"], running["output"]) == (200, "in_progress", [])
        async with http.get(f"{path}?stream=true") as whole, http.get(f"{path}?stream=true&starting_after=4") as rest:
            gate.let(100)
            events = events_of(await own.text())
            assert events_of(await whole.text()) == events
            assert events_of(await rest.text()) == events[5:]
    rebuilt(events)
    assert (await open_asking.call("GET", path))[0] == 404


@pytest.mark.parametrize(("route", "verb"), [("/v1/responses", "/cancel"), ("/v1/cancel", "")])
async def test_a_running_response_is_cancelled(open_asking: Asking, route: str, verb: str) -> None:
    gate = Gate(open_asking.mesh)
    gate.let(2)
    async with open_asking.api.http.post("/v1/responses", json={"input": "Hi", "stream": True}) as own:
        (found,) = open_asking.mesh.live.find(StreamViewer(None), "", "peer1")
        known = open_asking.mesh.request.request_id  # what others may see of the request
        assert (await open_asking.call("POST", f"/v1/responses/{known}/cancel"))[0] == 404
        status, cancelled = await open_asking.call("POST", f"{route}/{found.id}{verb}")
        assert (status, cancelled.get("status", "cancelled")) == (200, "cancelled")
        gate.let(100)
        assert events_of(await own.text())[-1]["type"] == "response.failed"
    status, _ = await open_asking.call("POST", f"/v1/responses/{found.id}/cancel")
    assert status == 404


async def test_the_id_of_a_response_without_a_key_is_its_secret(open_asking: Asking) -> None:
    response = await open_asking.response()
    known = open_asking.mesh.request.request_id  # what others may see of the request
    assert response["id"].startswith(f"{known}_") and len(response["id"]) == len(known) + 21
    assert (await open_asking.call("GET", f"/v1/responses/{known}"))[0] == 404
    assert (await open_asking.call("GET", f"/v1/responses/{response['id']}"))[0] == 200


async def test_responses_belong_to_the_key_that_asked(thinking_model: Path, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / FILE_NAME)
    made = [new_key(role, NOW) for role in (Role.USE, Role.USE, Role.ADMIN)]
    keys.write([key for _, key in made])
    owner, other, admin = ({"Authorization": f"Bearer {text}"} for text, _ in made)
    mesh = ScriptedMesh(thinking_model, limit=4096)
    async with served(mesh, ApiOptions(access=AccessPolicy(keys))) as api:
        asking = Asking(api)
        _, response = await asking.call("POST", "/v1/responses", {"input": "Hi"}, **owner)
        assert response["id"] == mesh.request.request_id
        more = {"input": "Hi", "previous_response_id": response["id"]}
        for caller, status in ((other, 404), (owner, 200), (admin, 200)):
            assert (await asking.call("GET", f"/v1/responses/{response['id']}", **caller))[0] == status
            assert (await asking.call("POST", "/v1/responses", more, **caller))[0] == status
        assert (await asking.call("DELETE", f"/v1/responses/{response['id']}", **other))[0] == 404


async def test_input_items_come_in_pages(asking: Asking) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    first = await asking.response(input=items)
    path = f"/v1/responses/{first['id']}/input_items"

    async def page(query: str) -> tuple[str, bool]:
        status, body = await asking.call("GET", f"{path}?{query}")
        assert status == 200 and body["object"] == "list", body
        texts = [item["content"][0]["text"] for item in body["data"]]
        assert not texts or [body["first_id"], body["last_id"]] == [body["data"][0]["id"], body["data"][-1]["id"]]
        return "".join(texts), body["has_more"]

    _, listed = await asking.call("GET", f"{path}?order=asc")
    ids = [item["id"] for item in listed["data"]]
    assert await page("") == ("43210", False)
    assert await page("order=asc&limit=2") == ("01", True)
    assert await page(f"order=asc&limit=2&after={ids[1]}") == ("23", True)
    assert await page(f"order=asc&after={ids[3]}") == ("4", False)
    assert await page(f"order=asc&before={ids[2]}") == ("01", False)
    for wrong in ("limit=0", "limit=101", "limit=x", "order=up", "after=nobody"):
        status, body = await asking.call("GET", f"{path}?{wrong}")
        assert (status, body["error"]["param"]) == (400, wrong.partition("=")[0])


@pytest.mark.parametrize(
    "query", ["stream=maybe", "starting_after=3", "stream=true&starting_after=-1", "include_obfuscation=true"]
)
async def test_queries_that_cannot_be_honoured_are_refused(asking: Asking, query: str) -> None:
    response = await asking.response()
    status, body = await asking.call("GET", f"/v1/responses/{response['id']}?{query}")
    assert status == 400, body
