"""The replies of /state and /v1/topology keep their fields, the order of these, and what is absent or null."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exo_mesh.domain.reports import TelemetryReport, TopologyReport, ViewReport
from exo_mesh.node.inspection.describe import describe_telemetry, describe_topology, describe_view
from tests.node.inspection.rich_mesh import rich_instances, rich_membership

RECORDED = (Path(__file__).parent / "state.json").read_bytes()
"""What a node said of this mesh when the replies were dictionaries."""
KINDS: dict[str, Any] = {"view": ViewReport, "telemetry": dict[str, TelemetryReport], "topology": TopologyReport}


def test_a_mesh_is_described_byte_for_byte_as_it_was_recorded() -> None:
    membership, instances = rich_membership(), rich_instances()
    shown = {
        "view": describe_view(membership.view, instances.phases),
        "telemetry": {peer_id: describe_telemetry(one) for peer_id, one in membership.telemetry.items()},
        "topology": describe_topology(membership, instances),
    }
    assert msgspec.json.format(msgspec.json.encode(shown), indent=1) + b"\n" == RECORDED


@pytest.mark.parametrize("part", KINDS)
def test_the_structs_read_a_recorded_reply_and_write_it_again(part: str) -> None:
    text = json.dumps(json.loads(RECORDED)[part]).encode()
    again = msgspec.json.encode(msgspec.json.decode(text, type=KINDS[part]))
    assert json.dumps(json.loads(again)).encode() == text
