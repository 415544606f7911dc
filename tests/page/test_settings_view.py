"""The Settings view in Chromium, on a scripted node of a closed mesh."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.api.web.languages import PageLanguages
from exo_mesh.api.web.qr import qr_rows
from exo_mesh.models.hub_token import HubToken
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role
from exo_mesh.security.invitations import Invitations
from exo_mesh.security.joining import Gift
from exo_mesh.security.secret import new_secret
from exo_mesh.settings.effective import EffectiveSettings, LoneSettings
from exo_mesh.settings.loading import load_settings
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.page.chromium import needs_chromium, page_at

pytestmark = needs_chromium
MARKUP = "<img src=x onerror=alert(1)>"
GIFT = Gift(new_secret(), "default", "studio", "192.168.1.5:5000")


async def test_settings_keys_and_invitations_are_changed_by_hand(scripted: ScriptedMesh, tmp_path: Path) -> None:
    from playwright.async_api import expect

    used = list[str]()
    keys = KeyFile(tmp_path / FILE_NAME)
    admin, _ = keys.add(Role.ADMIN, datetime.datetime.now(datetime.UTC))
    loaded = load_settings({"home": [str(tmp_path)], "name": [MARKUP]}, {})
    desk = LoneSettings(EffectiveSettings(loaded.settings, loaded.origins))
    invitations = Invitations(GIFT, lambda: ("192.168.1.5:52415",))
    (tmp_path / "fr.json").write_text(json.dumps({"nav.chat": MARKUP, "nav.settings": "Réglages"}))
    options = ApiOptions(
        access=AccessPolicy(keys, True),
        config=desk,
        hub_token=HubToken(tmp_path / "hub_token", used.append, {}),
        invitations=invitations,
        languages=PageLanguages((), tmp_path),
    )
    async with served(scripted, options) as api, page_at(f"{api.url}/#token={admin}") as page:
        await page.locator("nav").get_by_role("link", name="Settings").click()
        assert admin not in page.url and await page.evaluate("sessionStorage['exo.key']") == admin
        assert admin not in await page.evaluate("JSON.stringify(localStorage)")

        await page.get_by_label("Temperature").fill("0.3")
        await page.get_by_label("System prompt").fill(MARKUP)
        await page.locator("form", has_text="Settings of the mesh").get_by_role("button", name="Save").click()
        await expect(page.get_by_text("Current value here: 0.3 (set for the mesh)")).to_be_visible()
        assert desk.shared_texts == {"default_temp": "0.3", "system_prompt": MARKUP}
        await page.get_by_label("Temperature").fill("9")
        await page.locator("form", has_text="Settings of the mesh").get_by_role("button", name="Save").click()
        await expect(page.get_by_text("a number from 0 to 2 is needed")).to_be_visible()
        await page.get_by_role("button", name="Undo").click()
        await page.get_by_role("switch").click()
        await expect(page.get_by_text("this node traces: 100 %")).to_be_visible()
        await expect(page.get_by_role("cell", name=MARKUP).first).to_be_visible()

        await page.get_by_label("Token", exact=True).fill("hf_" + "x" * 30)
        await page.locator("form", has_text="Token for the").get_by_role("button", name="Save").click()
        await expect(page.get_by_text("A token is set (hub_token)")).to_be_visible()
        assert used == ["", "hf_" + "x" * 30] and "xxx" not in await page.content()

        await page.get_by_role("button", name="Create key").click()
        text = await page.locator(".copy-line code").inner_text()
        made = keys.check(text)
        assert made is not None and made.role is Role.USE
        row = page.locator(".plain-list li", has_text=made.id)
        await row.get_by_role("button", name="Revoke").click()
        await row.get_by_role("button", name="Revoke permanently?").click()
        await expect(row).to_have_count(0)
        assert keys.check(text) is None

        await page.get_by_role("button", name="Create code").click()
        await page.locator(".invitation").wait_for()
        assert invitations.last is not None
        command = f"exo-mesh join 192.168.1.5:52415/{invitations.last.password}"
        await expect(page.get_by_text(command)).to_be_visible()
        assert await drawn(page) == qr_rows(command)
        await page.get_by_role("button", name="Withdraw").click()
        await expect(page.get_by_text("The code was withdrawn.")).to_be_visible()

        card = page.locator("section", has_text="This browser")
        await card.get_by_label("Theme").select_option("dark")
        await card.get_by_label("Language").select_option("fr")
        await page.reload()
        await expect(page.get_by_role("link", name="Réglages")).to_be_visible()
        await expect(page.get_by_role("link", name=MARKUP)).to_be_visible()
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert await page.evaluate("document.documentElement.lang") == "fr"


async def drawn(page: Any) -> list[str]:
    """The modules of the QR code, as the browser fills them."""
    rows: list[str] = await page.evaluate(
        """() => {
          const path = document.querySelector(".qr path"), size = document.querySelector(".qr").viewBox.baseVal.width;
          const row = (y) => [...Array(size - 8).keys()].map((x) => Number(path.isPointInFill(new DOMPoint(x + 4.5, y + 4.5)))).join("");
          return [...Array(size - 8).keys()].map(row);
        }"""  # noqa: E501
    )
    return rows


async def test_who_may_not_change_settings_sees_no_places(scripted: ScriptedMesh, tmp_path: Path) -> None:
    from playwright.async_api import expect

    loaded = load_settings({"home": [str(tmp_path)]}, {})
    desk = LoneSettings(EffectiveSettings(loaded.settings, loaded.origins))
    async with served(scripted, ApiOptions(config=desk)) as api, page_at(f"{api.url}/#/settings") as page:
        await expect(page.get_by_text("needs a key with the role admin")).to_be_visible()
        await expect(page.get_by_role("cell", name="only for admins")).to_be_visible()
        for button in ("Save", "Create key", "Create code"):
            await expect(page.get_by_role("button", name=button).first).to_be_disabled()
        assert str(tmp_path) not in await page.content()
