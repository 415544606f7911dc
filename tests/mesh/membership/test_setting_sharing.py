"""Settings that are shared over the mesh: each change reaches every peer, and outlives restarts."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from exo_mesh.mesh.membership.setting_sharing import FILE_NAME, SettingSharing
from exo_mesh.settings.config import Settings
from exo_mesh.settings.effective import EffectiveSettings
from tests.mesh.membership.meshes import Peer, peer_info, until


@asynccontextmanager
async def sharing(
    home: Path, peer: Peer, origins: dict[str, str] | None = None, **own: object
) -> AsyncIterator[SettingSharing]:
    settings = Settings(home=home, name=peer.membership.own.name, **own)  # type: ignore[arg-type]
    effective = EffectiveSettings(settings, origins)
    shared = SettingSharing(effective, peer.membership, home / FILE_NAME, patience_s=0.0)
    keeping = asyncio.create_task(shared.keep())
    try:
        yield shared
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@asynccontextmanager
async def peers(*ids: str) -> AsyncIterator[list[Peer]]:
    """Memberships that know each other."""
    made = [await Peer(peer_info(peer_id)).start() for peer_id in ids]
    try:
        for peer in made[1:]:
            peer.membership.suggest(made[0].address)
        await until(lambda: all(peer.membership.num_peers == len(ids) - 1 for peer in made))
        yield made
    finally:
        await asyncio.gather(*(peer.stop() for peer in made))


def owners(peer: Peer) -> list[str]:
    return [owner for owner, _ in peer.membership.view.shared_settings()]


async def test_a_change_reaches_every_peer_and_one_record_stays(tmp_path: Path) -> None:
    async with (
        peers("a", "b", "c") as (a, b, c),
        sharing(tmp_path / "a", a) as at_a,
        sharing(tmp_path / "b", b, {"min_peers": "flag --min-peers"}, min_peers=1) as at_b,
        sharing(tmp_path / "c", c, {"min_peers": "config.toml:min_peers"}, min_peers=1) as at_c,
    ):
        await at_c.change({"default_temp": "0.5", "min_peers": "3"})
        assert at_c.effective.now.default_temp == 0.5
        await until(lambda: [one.effective.now.default_temp for one in (at_a, at_b)] == [0.5, 0.5])
        assert [one.effective.now.min_peers for one in (at_a, at_b, at_c)] == [3, 1, 3], "a flag is stronger"
        assert [one.effective.origin("min_peers") for one in (at_b, at_c)] == ["flag --min-peers", "mesh"]
        await until(lambda: all(owners(peer) == ["a"] for peer in (a, b, c)))
        await at_b.change({"default_temp": None})
        await until(lambda: at_a.shared_texts == at_c.shared_texts == {"min_peers": "3"})
        assert at_a.effective.now.default_temp is None


async def test_a_restart_forgets_nothing_and_a_newcomer_is_told(tmp_path: Path) -> None:
    async with peers("m") as (alone,), sharing(tmp_path / "m", alone) as shared:
        await shared.change({"system_prompt": "Be brief.\n“Ünï”"})
    assert stat.S_IMODE((tmp_path / "m" / FILE_NAME).stat().st_mode) == 0o600
    async with (
        peers("a", "m") as (a, m),
        sharing(tmp_path / "a", a) as at_a,
        sharing(tmp_path / "m", m) as at_m,
    ):
        assert at_m.effective.now.system_prompt == "Be brief.\n“Ünï”", "at once, also without a peer"
        await until(lambda: at_a.effective.now.system_prompt == at_m.effective.now.system_prompt)
        await until(lambda: owners(a) == ["a"])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"default_temp": 1}', '{"default_temp": {"text": 5}}', "\udcff"])
async def test_a_broken_file_does_not_stop_a_node(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_bytes(content.encode("utf-8", "surrogateescape"))
    async with peers("a") as (a,), sharing(tmp_path, a) as shared:
        assert shared.shared_texts == {}
        await shared.change({"min_peers": "2"})
    assert "min_peers" in (tmp_path / FILE_NAME).read_text()


def test_a_value_that_this_version_cannot_use_is_passed_over() -> None:
    effective = EffectiveSettings(Settings(home=Path("/nowhere"), name="n"))
    found = {"default_temp": "hot", "api_port": "1", "new_one": "1", "default_model": "/etc", "min_peers": "2"}
    assert effective.take(found) == ["default_temp", "api_port", "new_one", "default_model"]
    assert effective.now == Settings(home=Path("/nowhere"), name="n", min_peers=2)
