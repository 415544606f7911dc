"""GET and PUT /config: what is in force, where it came from, and what the mesh shares."""

from __future__ import annotations

import datetime
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.config_routes import SharedSettingsBody
from exo_mesh.api.context import ApiOptions, RequestDefaults
from exo_mesh.base.telemetry.node_logs import LoneLogs
from exo_mesh.models.hub_token import HubToken
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role
from exo_mesh.settings.config import Settings
from exo_mesh.settings.effective import SHARED, EffectiveSettings, LoneSettings
from exo_mesh.settings.loading import load_settings
from exo_mesh.settings.table import SETTINGS
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> ScriptedMesh:
    return ScriptedMesh(write_text_model(tmp_path_factory.mktemp("text-model")))


def options(
    tmp_path: Path,
    environ: dict[str, str] | None = None,
    on_change: Callable[[Settings], object] = lambda settings: None,
    **changes: Any,
) -> ApiOptions:
    loaded = load_settings({"home": [str(tmp_path)], "min_peers": ["2"]}, environ or {})
    desk = LoneSettings(EffectiveSettings(loaded.settings, loaded.origins, on_change))
    return ApiOptions(
        defaults=lambda: RequestDefaults.of(desk.effective.now),
        config=desk,
        config_file=str(loaded.config_file),
        **{"access": AccessPolicy(open_admin=True), **changes},
    )


async def config(api: Served, key: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    async with api.http.get("/config", headers={"Authorization": f"Bearer {key}"}) as reply:
        found = await reply.json()
        assert reply.status == 200, found
        return found, {one["name"]: one for one in found["settings"]}


async def put(api: Served, body: Any) -> tuple[int, dict[str, Any]]:
    async with api.http.put("/config", json=body) as reply:
        return reply.status, await reply.json()


async def test_every_setting_is_shown_with_its_origin(scripted: ScriptedMesh, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("max_queued = 7\n")
    async with served(scripted, options(tmp_path, {"EXO_MESH_LOG_LEVEL": "debug"})) as api:
        found, settings = await config(api)
    assert settings.keys() == SETTINGS.keys()
    assert {name for name, one in settings.items() if one["shared"]} == set(SHARED)
    assert settings["max_queued"]["value"] == "7"
    assert settings["max_queued"]["origin"] == f"{tmp_path}/config.toml:max_queued"
    assert settings["log_level"]["origin"] == "environment EXO_MESH_LOG_LEVEL"
    assert settings["log_level"]["choices"] == ["debug", "info", "warning", "error"]
    assert (settings["min_peers"]["origin"], settings["trace_sample"]["origin"]) == ("flag --min-peers", "default")
    assert found["config_file"] == f"{tmp_path}/config.toml"


async def test_what_is_shared_takes_effect_at_once_and_can_be_taken_back(
    scripted: ScriptedMesh, tmp_path: Path
) -> None:
    async with served(scripted, options(tmp_path)) as api:
        status, found = await put(api, {"default_temp": 0.25, "system_prompt": "Be brief.", "trace_sample": 1})
        assert (status, found["mesh"]) == (
            200,
            {"default_temp": "0.25", "system_prompt": "Be brief.", "trace_sample": "1"},
        )
        assert (await config(api))[1]["default_temp"]["origin"] == "mesh"
        await api.chat()
        assert api.mesh.request.sampling.temperature == 0.25
        assert len(api.mesh.request.trace_id) == 32
        status, found = await put(api, {"default_temp": None, "min_peers": "9"})
        assert found["mesh"] == {"system_prompt": "Be brief.", "trace_sample": "1", "min_peers": "9"}
        settings = (await config(api))[1]
        assert (settings["default_temp"]["value"], settings["default_temp"]["origin"]) == ("", "default")
        assert (settings["min_peers"]["value"], settings["min_peers"]["origin"]) == ("2", "flag --min-peers")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"api_port": 1}, "api_port", "api_port is a setting of each node: use --api-port"),
        ({"trace_sampel": 1}, "trace_sampel", "did you mean trace_sample?"),
        ({"default_temp": 3}, "default_temp", "a number from 0 to 2 is needed"),
        ({"default_temp": True}, "default_temp", 'not "true"'),
        ({"default_temp": [1]}, "default_temp", "expected"),
        ({"default_model": "/etc/passwd"}, "default_model", "a path is valid on one machine"),
        ({"system_prompt": "é" * 4000}, "system_prompt", "at most 4096 bytes"),
        ({"placement": "random"}, "placement", "must be one of memory, latency, throughput"),
        ({"secret_file": None}, "secret_file", "is a setting of each node"),
        ([], None, "expected"),
    ],
)
async def test_what_cannot_be_shared_is_refused_by_name(
    scripted: ScriptedMesh, tmp_path: Path, body: Any, param: str | None, message: str
) -> None:
    async with served(scripted, options(tmp_path)) as api:
        status, answer = await put(api, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert message in answer["error"]["message"]
        assert (await config(api))[0]["mesh"] == {}


async def test_no_secret_is_shown_and_places_are_for_admins(scripted: ScriptedMesh, tmp_path: Path) -> None:
    secret = "s3cr3t-Zq8Wm4Tn7Vb2Xc9Lk5Jh1Gf6Dp3Sa0Qw8Er"
    (tmp_path / "mesh.secret").write_text(secret)
    (tmp_path / "config.toml").write_text(
        'tailscale_api_url = "https://user:hunter2@example.org/x"\nsystem_prompt = "Our rules"\n'
        '[engine_option]\napi_key = "hunter3"\nurl = "http://10.0.0.9"\n'
    )
    keys = KeyFile(tmp_path / FILE_NAME)
    (use, _), (admin, _) = keys.add(Role.USE, NOW), keys.add(Role.ADMIN, NOW)
    async with served(scripted, options(tmp_path, access=AccessPolicy(keys))) as api:
        for key in (use, admin):
            found, _ = await config(api, key)
            assert not any(word in str(found) for word in (secret, "hunter", use, admin))
        settings = (await config(api, admin))[1]
        assert settings["engine_option"]["value"] == "api_key=***,url=http://10.0.0.9"
        assert settings["tailscale_api_url"]["value"] == "https://example.org/x"
        found, settings = await config(api, use)
        assert str(tmp_path) not in str(found) and "Our rules" not in str(found) and "10.0.0.9" not in str(found)
        assert settings["system_prompt"]["origin"] == "config.toml:system_prompt"


async def test_only_admins_see_the_value_of_a_setting_that_may_be_a_path(
    scripted: ScriptedMesh, tmp_path: Path
) -> None:
    paths = [name for name, one in SETTINGS.items() if one.metavar in ("DIR", "FILE", "WHAT") and not one.words]
    given = {"tls_cert", "tls_key", "prefix_disk", "log_file", "request_log", "llama_server", "power_tool"}
    assert given <= {*paths}
    (tmp_path / "config.toml").write_text("".join(f'{name} = "/srv/private"\n' for name in given))
    keys = KeyFile(tmp_path / FILE_NAME)
    (use, _), (admin, _) = keys.add(Role.USE, NOW), keys.add(Role.ADMIN, NOW)
    async with served(scripted, options(tmp_path, access=AccessPolicy(keys))) as api:
        found, settings = await config(api, use)
        assert "/srv/private" not in str(found)
        assert {settings[name]["value"] for name in paths} == {None}
        settings = (await config(api, admin))[1]
        assert {settings[name]["value"] for name in given} == {"/srv/private"}


async def test_the_token_for_the_hub_is_kept_used_and_never_shown(scripted: ScriptedMesh, tmp_path: Path) -> None:
    used: list[str] = []
    token = HubToken(tmp_path / "hub_token", used.append, {})
    async with served(scripted, options(tmp_path, hub_token=token)) as api:
        assert (await config(api))[0]["hf_token"] == {"is_set": False, "origin": ""}
        status, found = await put(api, {"hf_token": "hf_" + "x" * 30, "min_peers": 3})
        assert (status, found["hf_token"]) == (200, {"is_set": True, "origin": "hub_token"})
        assert "xxx" not in str(found) and found["mesh"] == {"min_peers": "3"}
        await put(api, {"min_peers": 4})
        assert used == ["", "hf_" + "x" * 30], "a change that leaves it out keeps it"
        for bad in ("a b", "x", "x" * 600, 5):
            status, answer = await put(api, {"hf_token": bad})
            assert (status, answer["error"]["param"]) == (400, "hf_token")
        assert stat.S_IMODE((tmp_path / "hub_token").stat().st_mode) == 0o600
        HubToken(tmp_path / "hub_token", used.append, {"HF_TOKEN": "hf_other"})
        assert used[-1] == "hf_" + "x" * 30, "a restart keeps it"
        await put(api, {"hf_token": None})
        assert used[-1] == "" and not (tmp_path / "hub_token").exists()


def test_the_body_has_a_field_for_every_shared_setting_with_its_type_or_a_text() -> None:
    assert {*SharedSettingsBody.__struct_fields__} == {*SHARED, "hf_token"}
    body = '{"min_peers": 2, "trace_sample": 0.5, "keep_agent_lines": true, "context_limit": "9", "log_level": null}'
    found = msgspec.to_builtins(msgspec.json.decode(body, type=SharedSettingsBody))
    assert found == msgspec.json.decode(body)
    for wrong in ('{"placement": 1}', '{"min_peers": 1.5}', '{"keep_agent_lines": 1}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(wrong, type=SharedSettingsBody)


async def test_the_log_level_of_one_node_is_changed_while_it_runs(scripted: ScriptedMesh, tmp_path: Path) -> None:
    async with served(scripted, options(tmp_path, logs=LoneLogs())) as api:
        for level, now in (("debug", "debug"), (None, "info")):
            async with api.http.put("/v1/logging", json={"level": level}) as reply:
                found = await reply.json()
                assert (reply.status, found["level"], found["own_level"]) == (200, now, level)
        for wrong in ({"level": "loud"}, {}, {"level": "debug", "format": "json"}):
            async with api.http.put("/v1/logging", json=wrong) as reply:
                assert reply.status == 400


async def test_the_log_level_of_the_mesh_is_a_shared_setting(scripted: ScriptedMesh, tmp_path: Path) -> None:
    changes: list[str] = []

    def note(settings: Settings) -> None:
        changes.append(f"{settings.log_level} {settings.log_format}")

    async with served(scripted, options(tmp_path, on_change=note)) as api:
        assert (await put(api, {"log_level": "debug", "log_format": "both"}))[0] == 200
        assert (await put(api, {"log_level": "debug"}))[0] == 200
        assert (await put(api, {"log_level": "loud"}))[0] == 400
        assert (await put(api, {"log_level": None, "log_format": None}))[0] == 200
    assert changes == ["debug both", "info console"], "only what changes is told"
