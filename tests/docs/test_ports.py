"""The table of ports has the defaults of the code, and those of the files that start the monitoring."""

from __future__ import annotations

import re
from pathlib import Path

from exo_mesh_rkllm.options import DEFAULT_PORT

from exo_mesh.settings.config import default_settings

ROOT = Path(__file__).resolve().parents[2]
MDNS_PORT = 5353
"""RFC 6762, section 3."""


def test_the_table_of_ports_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "tasks" / "discovery.md").read_text()
    table = page.partition("## Ports and firewall")[2].partition("```")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    named = {int(port) for cell in cells for port in re.findall(r"\b\d{4,5}\b", cell)}
    own = default_settings()
    others = set(map(int, re.findall(r'ports: \["127\.0\.0\.1:(\d+):', (ROOT / "compose.yaml").read_text())))
    assert len(others) == 2
    assert named == others | {own.api_port, own.grpc_port, own.listen_port, own.broadcast_port, MDNS_PORT, DEFAULT_PORT}
