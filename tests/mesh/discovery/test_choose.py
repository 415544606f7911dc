"""Which discoveries a node starts, and what it refuses before it starts any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exo_mesh.errors import InputError
from exo_mesh.mesh.discovery.choose import discoveries_for, is_loopback, why_not_announced
from exo_mesh.settings.config import Settings


def settings(tmp_path: Path, host: str, *ways: str, **more: Any) -> Settings:
    return Settings(home=tmp_path, name="n", host=host, discovery=ways, **more)


@pytest.mark.parametrize("host", ["2001:db8::5", "[fd00::5]", "studio.local"])
def test_udp_alone_with_a_host_that_it_cannot_announce_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(InputError, match="udp alone cannot announce --host") as refused:
        discoveries_for(settings(tmp_path, host, "udp"))
    assert refused.value.param == "host" and host in str(refused.value)
    assert "--bootstrap-peers" in str(refused.value)
    assert len(discoveries_for(settings(tmp_path, host, "udp", bootstrap_peers=("a:1",)))) == 2
    assert len(discoveries_for(settings(tmp_path, host, "udp", "mdns"))) == 2


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.5", "127.0.0.2", "::1", "[::1]", "localhost", "fe80::1%eth0"]
)
def test_udp_can_announce_any_other(tmp_path: Path, host: str) -> None:
    assert why_not_announced(host) == ""
    assert [one.name for one in discoveries_for(settings(tmp_path, host, "udp"))] == ["udp"]


def test_what_the_loopback_is() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]", "0:0:0:0:0:0:0:1"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "127.evil.example", "fe80::1%lo"]))
