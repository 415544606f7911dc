"""The chat in Firefox: an answer is stopped, continued, made again, its question edited, and all of it kept."""

from __future__ import annotations

from pathlib import Path

from exo_mesh.cli.client.local_mesh import local_mesh
from tests.page.chromium import MODEL
from tests.page.firefox import firefox_at, needs_firefox

pytestmark = needs_firefox
SLOW = ["--engine", "dummy", "--engine-option", "cost_ms=15", "--open-admin"]
TEXT = "one('.message.assistant > .markdown')?.innerText ?? ''"
STOP = "named('Stop').click(); await until(() => document.body.innerText.includes('Stopped by you'));"


def test_the_chat_works_in_firefox_and_every_view_fits(tmp_path: Path) -> None:
    with local_mesh(1, SLOW, "firefox", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client().post("/instance", {"model": MODEL}, 60.0)
        with firefox_at(mesh.api_urls[0], tmp_path) as firefox:
            firefox.run(f"await until(() => one('.model-choice select')?.value === '{MODEL}')")
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
