"""The web tools of a real node: turned on by its settings, for callers with local rights, for public pages only."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_mesh.errors import InputError, MeshError
from tests.support.peers import mesh

pytestmark = [pytest.mark.extended, pytest.mark.timeout(120)]


def test_a_node_fetches_for_its_user_and_never_from_itself(tmp_path: Path) -> None:
    with mesh(tmp_path, [["--web-tools"]], engine="numpy") as (peer,):
        for path in ("open_url", "extract_page"):
            for url in (f"{peer.url}/state", "http://localhost/", "http://169.254.169.254/latest/meta-data/"):
                with pytest.raises(InputError, match=r"port \d+ is not allowed|not a public address"):
                    peer.api.post(f"/v1/tools/{path}", {"url": url})
        with pytest.raises(MeshError, match="--web-search"):
            peer.api.post("/v1/tools/web_search", {"query": "x"})
        assert "/v1/tools" in peer.log and "169.254" not in peer.log, "calls are logged, and not what they ask for"
