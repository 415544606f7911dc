"""The command line, the doctor and the balancers read no field of a node's reports that the structs lack.

They read plain JSON: importing the structs and decoding would cost a verb about a tenth of its start, and JSON of a
node of another version is read as far as it goes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import exo_mesh
from exo_mesh.api.web import live
from exo_mesh.domain import reports

ROOT = Path(exo_mesh.__file__).parent
READERS = sorted(
    path
    for package in ("cli", "client", "doctor", "balancing")
    for path in (ROOT / package).rglob("*.py")
    if '["view"]' in path.read_text() or "reports" in path.read_text()
)


def fields(*kinds: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}


NAMES = {
    "state": fields(reports.StateReport),
    "view": fields(reports.ViewReport),
    "peer": fields(reports.PeerReport, reports.PeerHealth) | {*live.TELEMETRY_FIELDS},  # in the document of `top`
    "instance": fields(reports.InstanceReport),
    "stage": fields(reports.InstanceStage),
    "reading": fields(reports.TelemetryReport),
    "link": fields(reports.LinkReport),
    "cable": fields(reports.CableReport),
    "health": fields(reports.HealthReport),
    "reason": fields(reports.ReasonReport),
    "device": fields(reports.DeviceReport),
    "topology": fields(reports.TopologyReport),
}
"""By the name of a variable: the fields of what it holds."""


def keys_read(text: str) -> Iterator[tuple[str, str]]:
    """(variable, key) of each `variable["key"]` and `variable.get("key")`, and of chains such as `state["view"]["x"]`,
    where the last key before counts as the variable."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Subscript(value=holder, slice=ast.Constant(value=str(key))):
                pass
            case ast.Call(func=ast.Attribute(value=holder, attr="get"), args=[ast.Constant(value=str(key)), *_]):
                pass
            case _:
                continue
        match holder:
            case ast.Name(id=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
                yield name, key


@pytest.mark.parametrize("path", READERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_reads_known_fields(path: Path) -> None:
    found = {(name, key) for name, key in keys_read(path.read_text()) if name in NAMES and key not in NAMES[name]}
    assert not found
