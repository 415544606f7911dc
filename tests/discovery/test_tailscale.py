"""The Tailscale API, played by a local server with its answers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from exo_mesh.discovery.port import Announcement
from exo_mesh.discovery.tailscale import TailscaleDiscovery, device_addresses, read_key
from exo_mesh.errors import InputError, TransportError
from tests.discovery.waiting import until

OWN = Announcement("default", "me", 1)
DEVICES = {
    "devices": [
        {"name": "studio.example.ts.net", "addresses": ["100.64.0.1", "fd7a:115c:a1e0::1"], "connectedToControl": True},
        {"name": "phone.example.ts.net", "addresses": ["100.64.0.9"], "connectedToControl": False},
        {"name": "box.example.ts.net", "addresses": ["100.64.0.2", "not an address"]},
        {"name": "odd"},
        "odder",
    ]
}


class Api:
    """GET /api/v2/tailnet/{tailnet}/devices."""

    def __init__(self) -> None:
        self.status = 200
        self.reply: Any = DEVICES
        self.asked: list[tuple[str, str]] = []
        self.url = ""

    async def devices(self, request: web.Request) -> web.Response:
        self.asked.append((request.match_info["tailnet"], request.headers["Authorization"]))
        return web.json_response(self.reply, status=self.status)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = Api()
    app = web.Application()
    app.router.add_get("/api/v2/tailnet/{tailnet}/devices", api.devices)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield api
    await runner.cleanup()


def tailscale(api: Api, **options: float) -> TailscaleDiscovery:
    return TailscaleDiscovery("tskey-secret", "example.org", 5000, api_url=api.url, ask_every_s=0.05, **options)


async def test_devices_are_suggested_again_and_again(api: Api) -> None:
    heard: list[str] = []
    discovery = tailscale(api)
    await discovery.start(OWN, heard.append)
    await until(lambda: heard.count("100.64.0.2:5000") >= 2)
    await discovery.stop()
    assert set(heard) == {"100.64.0.1:5000", "[fd7a:115c:a1e0::1]:5000", "100.64.0.2:5000"}
    assert api.asked[0] == ("example.org", "Bearer tskey-secret")


async def test_a_refused_key_is_told_once_and_asked_again_ever_later(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    api.status = 401
    heard: list[str] = []
    discovery = tailscale(api, first_backoff_s=0.05)
    await discovery.start(OWN, heard.append)
    await until(lambda: len(api.asked) >= 4)
    api.status = 200
    await until(lambda: heard)
    await discovery.stop()
    (record,) = [record for record in caplog.records if record.name.startswith("exo_mesh")]
    assert record.levelno == logging.ERROR
    assert "refused the key for tailnet example.org (HTTP 401)" in record.message and "tskey" not in record.message


async def test_an_api_that_is_away_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    discovery = TailscaleDiscovery("k", "-", 5000, api_url="http://127.0.0.1:9", first_backoff_s=0.02)
    await discovery.start(OWN, lambda address: None)
    await until(lambda: caplog.records)
    await discovery.stop()
    assert "does not answer" in caplog.records[0].getMessage()


@pytest.mark.parametrize("reply", [None, [], {}, {"devices": 3}, "x"])
def test_an_answer_of_another_shape_is_refused(reply: Any) -> None:
    with pytest.raises(TransportError, match="without a list of devices"):
        device_addresses(reply, 5000)


@pytest.mark.parametrize("content", [None, "", "  \n", "two words", "schlüssel"])
def test_a_key_file_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match="key: "):
        read_key(path)
    path.write_text("tskey-api-1\n")
    assert read_key(path) == "tskey-api-1"
