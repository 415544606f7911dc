"""The page in Firefox, on real nodes: the chat, the views of the mesh, and answers that outlive a tab, a stage and the
node that serves the page."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from exo_mesh.errors import MeshError
from tests.page.chromium import MODEL
from tests.page.firefox import Firefox, firefox_at, needs_firefox

pytestmark = needs_firefox
SLOW = ["--engine", "dummy", "--engine-option", "cost_ms=15", "--open-admin"]
TEXT = "one('.message.assistant > .markdown')?.innerText ?? ''"
STOP = "named('Stop').click(); await until(() => document.body.innerText.includes('Stopped by you'));"


def test_the_chat_works_in_firefox_and_every_view_fits(tmp_path: Path) -> None:
    with local_mesh(1, SLOW, "firefox", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client().post("/instance", {"model": MODEL}, 60.0)
        with firefox_at(mesh.api_urls[0], tmp_path) as firefox:
            firefox.run(f"await until(() => one('.model-choice .chosen')?.value === '{MODEL}')")
            firefox.run(
                f"await write(one('.composer textarea'), 'Hello'); await until(() => ({TEXT}).length > 20); {STOP}"
            )
            stopped = firefox.run(f"return {TEXT}")
            longer = f"await until(() => ({TEXT}).length > {len(stopped) + 20});"
            firefox.run(f"button('Continue').click(); {longer} {STOP}")
            assert firefox.run(f"return {TEXT}").startswith(stopped)
            again = "await until(() => one('.message.assistant[aria-busy=true] > .markdown'));"
            firefox.run(f"named('Regenerate').click(); {again} {STOP} await until(() => one('.assistant .versions'))")
            firefox.run("named('Edit').click(); await until(() => one('.editor'))")
            firefox.run(f"await write(one('.editor textarea'), 'other'); {again} {STOP}")
            firefox.call("WebDriver:Refresh")
            firefox.run("await until(() => one('.user .versions'))")
            shown = firefox.run("return all('.bubble, .versions').map((found) => found.innerText)")
            assert shown == ["other", "2/2"]
            firefox.run("named('Previous version').click(); await until(() => one('.bubble').innerText === 'Hello')")
            fits = "document.documentElement.scrollWidth <= innerWidth"
            for width in (1280, 500):  # it makes no narrower window
                firefox.call("WebDriver:SetWindowRect", width=width, height=900)
                for name in ("mesh", "models", "requests", "settings", "chat"):
                    firefox.run(f"location.hash = '#/{name}'; await until(() => one('main.view-{name} :is(h1, h2)'))")
                    assert firefox.run(f"return {fits}"), (name, width)


QUESTION = {"role": "user", "content": "Count from 7 to 90."}


def answered(mesh: LocalMesh, index: int, num_tokens: int) -> str:
    """What the mesh answers to a program."""
    body = {"model": MODEL, "max_tokens": num_tokens, "temperature": 0, "messages": [QUESTION]}
    text: str = mesh.client(index).post("/v1/chat/completions", body, 120.0)["choices"][0]["message"]["content"]
    return text


def test_the_views_of_a_mesh_of_three_nodes_work_in_firefox(tmp_path: Path) -> None:
    """First look, models, mesh and requests, as the tests of Chromium go through them."""
    with local_mesh(3, SLOW, "firefox", api_port=0) as mesh:
        mesh.wait_until_joined()
        with firefox_at(mesh.api_urls[0], tmp_path) as firefox:
            look_at_the_empty_chat(firefox)
            place_over_two(firefox)
            ended: list[str] = []
            asking = threading.Thread(target=lambda: ended.append(outcome_of(mesh)))
            asking.start()
            try:
                tend_a_peer(firefox, mesh)
                firefox.run("await view('requests'); await click('section.card td button.danger', 'Stop')")
            finally:
                asking.join(60.0)
            assert ended == ["cancelled"]
            firefox.run("await says('main', 'No running answer that you may see.')")
            firefox.run("await until(() => one('.status-499, td .pill[class*=status-]'))")


def outcome_of(mesh: LocalMesh) -> str:
    """How a long answer ends that a program asks for."""
    try:
        answered(mesh, 0, 3000)
    except MeshError as error:
        return "cancelled" if "cancel" in str(error) else str(error)
    return "finished"


def look_at_the_empty_chat(firefox: Firefox) -> None:
    firefox.run("await until(() => all('.small-mesh svg .peer').length === 3)")
    firefox.run("await until(() => all('.questions button').length === 3)")
    assert firefox.run("return all('.step h2').length") == 2
    firefox.run("await says('.readiness', 'the first message loads it')")


def place_over_two(firefox: Firefox) -> None:
    """Place the demo model by its preview, with the layers written by hand."""
    firefox.run(f"await view('models'); await click('.item.model button', 'Place … {MODEL}')")
    firefox.run("await says('.way', 'Peers: 2')")
    firefox.run(
        "fill(named('Layers of peer-1'), '0-2'); await says('.place .note', 'must cover each layer from 0 to 7')"
    )
    firefox.run("fill(named('Layers of peer-2'), '3-7'); await click('button', 'Place with these layers')")
    firefox.run("await until(() => one('.pill.state-ready') && all('.stages li').length === 2)")
    assert firefox.run("return text('.stages li').trim()").startswith("peer-1 layers 0–2")


def tend_a_peer(firefox: Firefox, mesh: LocalMesh) -> None:
    firefox.run("await view('mesh'); await until(() => one('svg.ring .hop.flowing'))")
    assert firefox.run("return all('svg.ring .peer').length") == 3
    firefox.run("await click('svg.ring .peer:not(.holds)'); await until(() => one('.peer-card.chosen .log li'))")
    buttons = ".peer-card.chosen button"
    firefox.run(f"await click('{buttons}', 'Drain'); await says('{buttons}', 'Accept requests again')")
    assert mesh.client(2).get("/drain")["draining"]
    firefox.run(f"await click('{buttons}', 'Accept requests again'); await says('{buttons}', 'Drain')")


def test_an_answer_outlives_its_tab_a_stage_and_the_node_of_the_page_in_firefox(tmp_path: Path) -> None:
    num_tokens = 250
    with local_mesh(3, SLOW, "firefox", api_port=0) as mesh:
        mesh.wait_until_joined()
        ids = {one["name"]: one["id"] for one in mesh.client().get("/state")["view"]["peers"]}
        place(mesh, {ids["peer-2"]: [0, 4], ids["peer-3"]: [4, 8]})
        with firefox_at(mesh.api_urls[0], tmp_path) as firefox:
            firefox.run(f"await until(() => one('.model-choice .chosen')?.value === '{MODEL}')")
            ask_for(firefox, num_tokens)
            firefox.run(f"await until(() => ({TEXT}).length > 20)")
            firefox.reopen(mesh.api_urls[0])
            firefox.run(f"await until(() => ({TEXT}).length > 60)")
            assert firefox.run("return text('.computed-by').replace(/\\s+/g, ' ')") == "peer-2 0–3 peer-3 4–7"
            os.killpg(mesh.children[2].pid, signal.SIGKILL)
            firefox.run("await says('.takeover', 'peer-3 stopped; ')")
            os.killpg(mesh.children[0].pid, signal.SIGKILL)
            firefox.run("await says('.takeover', 'peer-1 stopped; ')")
            answer = whole_answer(firefox)
            assert (answer["error"], answer["finish"], answer["tokens"]) == (None, "length", num_tokens)
            assert answer["content"] == answered(mesh, 1, num_tokens)
            firefox.run("await says('.connection', 'peer-2')")


def place(mesh: LocalMesh, layers: dict[str, list[int]]) -> None:
    mesh.client().post("/instance", {"model": MODEL, "pins": layers}, 60.0)


def ask_for(firefox: Firefox, num_tokens: int) -> None:
    """Write the question in the chat, for an answer of so many tokens."""
    firefox.run("named('Options').click(); await until(() => labelled('Token limit'))")
    firefox.run(f"fill(labelled('Token limit'), {num_tokens}); fill(labelled('Temperature'), 0)")
    firefox.run(f"named('Options').click(); await write(one('.composer textarea'), '{QUESTION['content']}')")


def whole_answer(firefox: Firefox) -> dict[str, Any]:
    """The last message of the newest conversation as the browser keeps it, once it is complete."""
    firefox.run("await until(() => named('Regenerate'))")
    message: dict[str, Any] = firefox.run("return (await newest()).messages.at(-1)")
    return message
