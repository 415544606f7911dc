"""The Models view and the empty chat in Chromium, over scripted answers: only what can work is offered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.domain.reports import StateReport
from exo_mesh.domain.whole.served import ServedModel
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.page.chromium import axe_findings, needs_axe, needs_chromium, open_view, page_at
from tests.page.mesh_fixture import GB, mesh_state, peer_id

pytestmark = needs_chromium


def model(name: str, **fields: Any) -> dict[str, Any]:
    """A model as GET /v1/models lists it."""
    known = {"object": "model", "context_length": 8192, "num_bytes": 40 * GB, "num_layers": 60, "quantization": "4bit",
             "dtype": "bfloat16", "status": "downloaded", "peers": [peer_id(0)], "instance_ids": [],
             "tasks": ["text_generation"], "served_by": []}  # fmt: skip
    return {"id": name, **known, **fields}


def card(name: str, size: int, *aliases: str) -> dict[str, Any]:
    known = {"peers": [], "features": ["tools"], "engines": ["mlx", "torch"], "family": name.partition("/")[0]}
    return model(
        name, status="known", num_bytes=0, estimated_bytes=size * GB, aliases=aliases, quantization="", **known
    )


SERVER = {"engine": "openai", "server": "127.0.0.1:8080", "model": "writer", "gets_text": True}
WRITER = model("writer", num_bytes=0, num_layers=0, status="served", served_by=[SERVER])
CARDS = [card("o/Small-1B", 2, "small:1b"), card("p/Large-30B", 60, "large"), card("q/Huge-400B", 800, "huge")]


@asynccontextmanager
async def shown(
    scripted: ScriptedMesh, state: StateReport, models: list[dict[str, Any]], **context: Any
) -> AsyncIterator[Any]:
    """The page of a node with this state and these models."""
    scripted = replace(scripted)
    scripted.services.observation.state = lambda: state  # type: ignore[method-assign]
    options = ApiOptions(access=AccessPolicy(open_admin=True), live_interval_s=0.05)

    async def listed(route: Any) -> None:
        data = CARDS if "status=known" in route.request.url else models
        await route.fulfill(json={"object": "list", "data": data})

    async with served(scripted, options) as api, page_at(api.url, **context) as page:
        await page.route("**/v1/models*", listed)
        await page.reload()
        await open_view(page, "models")
        yield page


async def test_what_fits_is_offered_first_with_size_and_machines(scripted: ScriptedMesh) -> None:
    from playwright.async_api import expect

    async with shown(scripted, mesh_state(3), []) as page:
        assert (await page.locator("section h2").all_inner_texts())[0] == "Get a model"
        offers = page.locator(".offer")
        await expect(offers).to_have_count(2)
        await expect(offers.nth(0)).to_contain_text("o/Small-1B")
        await expect(offers.nth(0)).to_contain_text("about 2.0 GB · fits on 3 of 3 machines")
        await expect(offers.nth(1)).to_contain_text("about 60 GB · fits on 1 of 3 machines")
        assert await page.locator("main button.primary").count() == 1, "one main button"


async def test_a_pull_shows_at_once_that_the_hub_is_asked_and_then_what_is_wrong(scripted: ScriptedMesh) -> None:
    from playwright.async_api import expect

    async with shown(scripted, mesh_state(3), []) as page:
        answered = asyncio.Event()

        async def refuse(route: Any) -> None:
            await answered.wait()
            error = {"error": {"message": "there is no model nobody/nothing", "code": "fetch_failed"}}
            await route.fulfill(status=404, body=json.dumps(error), content_type="application/json")

        await page.route("**/download/start", refuse)
        await page.get_by_label("Hugging Face hub").fill("nobody/nothing")
        await page.get_by_role("button", name="Pull", exact=True).click()
        await expect(page.locator(".looking")).to_have_text("nobody/nothing: looking at the hub …")
        answered.set()
        await expect(page.locator("main .note").first).to_have_text("nobody/nothing: there is no model nobody/nothing")
        await expect(page.locator(".looking")).to_have_count(0)


async def test_a_part_of_a_model_offers_nothing_while_the_rest_arrives(scripted: ScriptedMesh) -> None:
    from playwright.async_api import expect

    part = model("org/big-70b", status="partial")
    async with shown(scripted, mesh_state(3, stages=False, fetched=0.25), [part]) as page:
        row = page.locator(".item.model", has_text="org/big-70b")
        await expect(row).to_contain_text("Its files are arriving.")
        await expect(row.locator(".pill")).to_have_text("part")
        assert await row.locator("button").count() == 0
    async with shown(
        scripted, mesh_state(3, stages=False), [part, model("org/far-too-big", num_bytes=900 * GB)]
    ) as page:
        row = page.locator(".item.model", has_text="org/big-70b")
        await expect(row.get_by_role("button", name="Load")).to_be_enabled()
        big = page.locator(".item.model", has_text="org/far-too-big")
        await expect(big).to_contain_text("too large: needs about 990 GB, ")
        assert await big.get_by_role("button").all_inner_texts() == ["Delete"]


async def test_a_model_of_a_server_is_shown_as_what_it_is(scripted: ScriptedMesh) -> None:
    from playwright.async_api import expect

    state = mesh_state(2)
    (instance,) = state.view.instances
    instance.model, instance.stages = "writer", instance.stages[:1]
    instance.stages[0].layers, instance.stages[0].engine = (0, 1), "openai"
    state.view.peers[0].served = (ServedModel("writer", "openai", "127.0.0.1:8080", "writer"),)
    async with shown(scripted, state, [WRITER]) as page:
        card = page.locator("section", has_text="Served elsewhere")
        await expect(card).to_contain_text("Served by openai at 127.0.0.1:8080: prompts and answers go there as text")
        await expect(card.get_by_role("button")).to_have_count(0)
        await expect(page.locator(".item.model")).to_have_count(0)
        await expect(page.locator(".stages")).to_have_count(0)
        await expect(page.locator("main")).to_contain_text("passes the text of requests on to openai at 127.0.0.1:8080")
        await open_view(page, "mesh")
        mark = page.locator("svg.ring .peer.holds")
        await expect(mark.locator(".inside")).to_have_text("server")
        assert await mark.locator(".rim").count() == 0


async def test_without_a_hub_the_page_says_so_and_offers_nothing(scripted: ScriptedMesh) -> None:
    from playwright.async_api import expect

    state = mesh_state(2)
    for peer in state.view.peers:
        peer.fetches = "peers"
    async with shown(scripted, state, []) as page:
        await expect(page.locator(".get-model")).to_contain_text("No machine of this mesh may ask the Hugging Face hub")
        assert await page.locator(".get-model button").count() == 0


async def test_an_empty_chat_shows_the_mesh_three_questions_and_the_next_steps(scripted: ScriptedMesh) -> None:
    from playwright.async_api import expect

    for locale, heading in (("en-US", "Add a machine"), ("de-DE", "Eine Maschine hinzufügen")):
        demo = model("exo-mesh-demo", num_bytes=GB, status="loaded")
        async with shown(scripted, mesh_state(3), [demo], locale=locale) as page:
            await open_view(page, "chat")
            await expect(page.locator(".small-mesh svg .peer")).to_have_count(3)
            assert await page.locator(".small-mesh svg [tabindex]").count() == 0, "one link, not a button for each peer"
            await expect(page.locator(".questions button").first).to_have_text("Count from 7 to 20.")
            await expect(page.locator(".step").nth(0)).to_contain_text("p/Large-30B")
            await expect(page.locator(".step h2").nth(1)).to_have_text(heading)
            await page.set_viewport_size({"width": 390, "height": 844})
            assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth")
            assert await page.locator(".messages").evaluate("(place) => place.scrollTop") == 0
            await page.locator(".small-mesh").focus()
            await page.keyboard.press("Enter")
            await page.locator("main.view-mesh").wait_for()


async def test_the_composer_finds_a_model_and_says_whether_it_fits_with_the_keyboard(scripted: ScriptedMesh) -> None:
    from playwright.async_api import expect

    demo = model("exo-mesh-demo", num_bytes=GB, status="loaded")
    models = [demo, model("org/big-70b"), model("org/far-too-big", num_bytes=900 * GB), WRITER]
    async with shown(scripted, mesh_state(3, stages=False), models) as page:
        await open_view(page, "chat")
        chosen = page.locator(".model-choice .chosen")
        await expect(chosen).to_have_text("Model: exo-mesh-demo")
        await chosen.focus()
        await page.keyboard.press("Enter")
        field = page.get_by_role("combobox", name="Search models")
        await expect(field).to_be_focused()
        await expect(page.get_by_role("option")).to_have_count(4)
        await expect(page.get_by_role("option", selected=True)).to_have_text("exo-mesh-demo")
        await expect(page.get_by_role("option", name="org/big-70b")).to_contain_text("40 GB · fits on 2 of 3 machines")
        await page.keyboard.type("too big far")
        await expect(page.get_by_role("option")).to_have_count(1)
        await page.keyboard.press("Enter")
        await expect(field).to_be_visible()  # what cannot work is not chosen
        await field.fill("org/")
        await page.keyboard.press("Enter")
        await expect(chosen).to_have_text("Model: org/big-70b")
        await expect(chosen).to_be_focused()
        await page.keyboard.press("Enter")
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("option")).to_have_count(0)
        await expect(chosen).to_have_text("Model: org/big-70b")
        await chosen.click()
        await page.locator(".messages").click(position={"x": 5, "y": 5})
        await expect(page.get_by_role("option")).to_have_count(0)
        for width in (390, 768, 1280, 1920):
            await page.set_viewport_size({"width": width, "height": 800})
            await chosen.click()
            box = await page.locator(".model-panel").bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] >= 0, width
            await page.keyboard.press("Escape")


async def test_in_a_closed_mesh_an_admin_makes_a_code_in_the_empty_chat(scripted: ScriptedMesh) -> None:
    from playwright.async_api import expect

    state = mesh_state(2)
    state.health.mesh = "closed"
    async with shown(scripted, state, []) as page:
        await open_view(page, "chat")
        step = page.locator(".step", has_text="Add a machine")
        await expect(step).to_contain_text("typed or as a QR code")
        await step.get_by_role("button", name="Show a code").click()
        await expect(step.get_by_role("button", name="Create code")).to_be_enabled()
        await expect(page.locator(".step").first).to_contain_text("Get a model for this mesh")
        assert await page.locator(".questions").count() == 0, "there is no model to ask"


@pytest.mark.parametrize("locale", ["en-US", "de-DE"])
async def test_what_is_new_fits_every_width(scripted: ScriptedMesh, locale: str) -> None:
    models = [model("org/big-70b"), model("org/" + "very-" * 20 + "long", num_bytes=900 * GB), WRITER]
    async with shown(scripted, mesh_state(5, fetched=0.25), models, locale=locale) as page:
        for width in (390, 768, 1280, 1920):
            await page.set_viewport_size({"width": width, "height": 900})
            for name in ("models", "mesh", "chat"):
                await open_view(page, name)
                wide = "(document.querySelector('main').scrollWidth > document.querySelector('main').clientWidth)"
                assert not await page.evaluate(f"document.documentElement.scrollWidth > innerWidth || {wide}"), name


async def test_a_model_is_found_placed_and_pulled_with_the_keyboard_only(scripted: ScriptedMesh) -> None:
    from playwright.async_api import expect

    async with shown(scripted, mesh_state(3), [model("org/big-70b", status="downloaded")]) as page:
        await page.locator("#main").focus()
        await tab_to(page, "Pull o/Small-1B")
        async with page.expect_request("**/download/start") as asked:
            await page.keyboard.press("Enter")
        assert (await asked.value).post_data_json == {"model": "o/Small-1B"}
        await tab_to(page, "Place … org/big-70b")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("form", name="Place org/big-70b")).to_be_visible()
        await open_view(page, "mesh")
        await page.locator("#main").focus()
        await page.keyboard.press("Tab")
        await expect(page.locator(".ring .peer").first).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator(".peer-card.chosen")).to_have_count(1)


async def tab_to(page: Any, name: str) -> None:
    """Press Tab until a button of this name has the focus."""
    for _ in range(40):
        await page.keyboard.press("Tab")
        if await page.evaluate("document.activeElement.textContent") == name:
            return
    raise AssertionError(f"Tab leads to no button {name}")


@needs_axe
async def test_axe_finds_nothing_in_what_is_new(scripted: ScriptedMesh) -> None:
    found = {}
    state = mesh_state(3, fetched=0.25)
    async with shown(scripted, state, [model("org/big-70b"), WRITER], reduced_motion="reduce") as page:
        for name in ("models", "mesh", "chat"):
            await open_view(page, name)
            for scheme in ("light", "dark"):
                await page.emulate_media(color_scheme=scheme)
                found[name, scheme] = await axe_findings(page)
    assert {where: findings for where, findings in found.items() if findings} == {}
