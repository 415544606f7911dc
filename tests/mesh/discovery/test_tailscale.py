"""The Tailscale API, played by a local server with its answers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from exo_mesh.errors import InputError, TransportError
from exo_mesh.mesh.discovery.port import Announcement
from exo_mesh.mesh.discovery.tailscale import PORT_ATTRIBUTE, TailscaleDiscovery, devices_in, port_in, read_key
from tests.mesh.discovery.waiting import until

OWN = Announcement("default", "me", 1)
DEVICES = {
    "devices": [
        {
            "name": "studio.example.ts.net",
            "nodeId": "studio",
            "addresses": ["100.64.0.1", "fd7a:115c:a1e0::1"],
            "connectedToControl": True,
        },
        {"name": "phone.example.ts.net", "addresses": ["100.64.0.9"], "connectedToControl": False},
        {"name": "box.example.ts.net", "nodeId": "box", "addresses": ["100.64.0.2", "not an address"]},
        {"name": "odd"},
        "odder",
    ]
}


class Api:
    """GET /api/v2/tailnet/{tailnet}/devices, GET and POST /api/v2/device/{id}/attributes."""

    def __init__(self) -> None:
        self.status = 200
        self.reply: Any = DEVICES
        self.asked: list[tuple[str, str]] = []
        self.url = ""
        self.attributes: dict[str, dict[str, Any]] = {}
        self.attribute_status = 200
        self.read: list[str] = []

    async def devices(self, request: web.Request) -> web.Response:
        self.asked.append((request.match_info["tailnet"], request.headers["Authorization"]))
        return web.json_response(self.reply, status=self.status)

    async def get_attributes(self, request: web.Request) -> web.Response:
        self.read.append(request.match_info["id"])
        held = self.attributes.get(request.match_info["id"], {})
        return web.json_response({"attributes": held}, status=self.attribute_status)

    async def set_attribute(self, request: web.Request) -> web.Response:
        if self.attribute_status == 200:
            value = (await request.json())["value"]
            self.attributes.setdefault(request.match_info["id"], {})[request.match_info["key"]] = value
        return web.json_response({}, status=self.attribute_status)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = Api()
    app = web.Application()
    app.router.add_get("/api/v2/tailnet/{tailnet}/devices", api.devices)
    app.router.add_get("/api/v2/device/{id}/attributes", api.get_attributes)
    app.router.add_post("/api/v2/device/{id}/attributes/{key}", api.set_attribute)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield api
    await runner.cleanup()


def tailscale(api: Api, **options: Any) -> TailscaleDiscovery:
    return TailscaleDiscovery("tskey-secret", "example.org", 5000, api_url=api.url, ask_every_s=0.05, **options)


async def test_devices_are_suggested_again_and_again(api: Api) -> None:
    heard: list[str] = []
    discovery = tailscale(api)
    await discovery.start(OWN, heard.append)
    await until(lambda: heard.count("100.64.0.2:5000") >= 2)
    await discovery.stop()
    assert set(heard) == {"100.64.0.1:5000", "[fd7a:115c:a1e0::1]:5000", "100.64.0.2:5000"}
    assert api.asked[0] == ("example.org", "Bearer tskey-secret")


async def test_nodes_on_other_ports_find_each_other_by_the_attributes_of_their_devices(api: Api) -> None:
    heard: dict[str, list[str]] = {"studio": [], "box": []}
    found = []
    for name, host, port in (("studio", "100.64.0.1", 5007), ("box", "100.64.0.2", 6001)):
        discovery = tailscale(api, hosts=lambda host=host: [host])
        await discovery.start(Announcement("default", name, port), heard[name].append)
        found.append(discovery)
        await until(lambda name=name, port=port: api.attributes.get(name) == {PORT_ATTRIBUTE: port})
    await until(lambda: "100.64.0.1:5007" in heard["box"])
    third: list[str] = []
    discovery = tailscale(api, hosts=lambda: ["100.64.0.3"])
    await discovery.start(OWN, third.append)
    await until(lambda: third.count("100.64.0.2:6001") >= 3)
    for one in (*found, discovery):
        await one.stop()
    assert set(third) == {"100.64.0.1:5007", "[fd7a:115c:a1e0::1]:5007", "100.64.0.2:6001"}
    assert api.read.count("studio") <= 2 and api.read.count("box") <= 2, "attributes are read once in five minutes"


async def test_a_key_without_the_scope_of_attributes_is_told_once_and_finds_peers_on_its_own_port(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    api.attribute_status = 403
    heard: list[str] = []
    discovery = tailscale(api, hosts=lambda: ["100.64.0.1"])
    await discovery.start(Announcement("default", "studio", 5007), heard.append)
    await until(lambda: heard.count("100.64.0.2:5000") >= 3)
    await discovery.stop()
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("exo_mesh")]
    assert len(texts) == 2 and all("devices:posture_attributes" in text for text in texts)
    assert "peers cannot find out that this node uses port 5007" in texts[0] and "only peers on port 5000" in texts[1]


@pytest.mark.parametrize("port", [None, 0, 70000, "5000", True, -1, [5000], {}])
def test_an_attribute_that_is_no_port_is_none(port: Any) -> None:
    assert port_in({"attributes": {PORT_ATTRIBUTE: port}}) is None
    assert port_in({"attributes": {PORT_ATTRIBUTE: 5001}}) == 5001
    assert port_in([]) is None and port_in({"attributes": 3}) is None


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
        devices_in(reply)


@pytest.mark.parametrize("content", [None, "", "  \n", "two words", "schlüssel"])
def test_a_key_file_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match="key: "):
        read_key(path)
    path.write_text("tskey-api-1\n")
    assert read_key(path) == "tskey-api-1"
