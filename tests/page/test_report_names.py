"""The page reads no field of the live document that the structs of the API lack."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from exo_mesh.api.web import live
from exo_mesh.domain import reports
from exo_mesh.settings.effective import SHARED
from exo_mesh.settings.table import SETTINGS
from tests.api.scripted_mesh import ScriptedMesh

APP = Path(live.__file__).parent / "app"
READERS = ("changes", "main", "mesh_view", "models", "models_view", "peer_card", "readiness", "ring", "ring_layout")
"""Modules that get the live document. In others the same words name parts of other replies."""


def fields(*kinds: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}


def keys_read(text: str, name: str) -> set[str]:
    """What follows `name.` or `name?.` in a module, where it is not a call."""
    return set(re.findall(rf"(?<![.\w\"]){name}\??\.(\w+)\b(?!\()", text))


PEER = {
    *live.PEER_FIELDS,
    *live.TELEMETRY_FIELDS,
    *fields(reports.PeerHealth),
    "asleep",
}  # the last is the mark of ring.js
NAMES = {
    "peer": PEER,
    "instance": fields(reports.InstanceReport),
    "stage": fields(reports.InstanceStage),
    "link": fields(reports.LinkReport, reports.HopReport),
    "cable": fields(reports.CableReport),
    "end": fields(reports.CableEnd) | {"x", "y"},  # of an arrow in ring.js
    "health": fields(reports.HealthReport),
    "reason": fields(reports.ReasonReport),
    "device": fields(reports.DeviceReport),
    "download": fields(reports.DownloadReport),
}
"""By the name of a variable in the page: the fields of what it holds."""


def test_the_live_document_shows_fields_that_there_are() -> None:
    assert fields(reports.PeerReport) >= set(live.PEER_FIELDS)
    assert fields(reports.TelemetryReport) >= set(live.TELEMETRY_FIELDS)


@pytest.mark.parametrize("module", READERS)
def test_a_module_of_the_page_reads_known_fields(module: str) -> None:
    text = (APP / f"{module}.js").read_text()
    unknown = {name: keys_read(text, name) - known for name, known in NAMES.items()}
    assert not {name: keys for name, keys in unknown.items() if keys}


def test_the_page_reads_known_parts_of_the_document(scripted: ScriptedMesh) -> None:
    known = live.live_document(scripted.services.observation, 1.0).keys()
    for path in APP.glob("*.js"):
        text = path.read_text()
        assert keys_read(text, r"mesh\.document") | keys_read(text, "live") <= known, path.name
        for names in re.findall(r"\{([^}]*)\} = (?:mesh\.document|live)\b", text):
            assert {name.partition(":")[0].strip() for name in names.split(",")} <= known, path.name


def test_the_form_of_the_page_has_shared_settings_with_fields_of_their_kind() -> None:
    (form,) = re.findall(r"FORM = \{(.*?)\}", (APP / "settings_view.js").read_text(), re.DOTALL)
    kinds = dict(re.findall(r'(\w+): "(\w+)"', form))
    assert len(kinds) > 5 and kinds.keys() <= {*SHARED}
    for name, kind in kinds.items():
        setting = SETTINGS[name]
        expected = "choice" if setting.words else {bool: "switch", str: "text"}.get(setting.toml[-1], "number")
        assert kind == expected or (kind, expected) == ("long", "text"), name


def test_a_name_that_the_structs_lack_is_found() -> None:
    assert keys_read("peer.usable_bytes + peer?.usable_byte, peer.name.length, a.peer.x", "peer") == {
        "usable_bytes", "usable_byte", "name",
    }  # fmt: skip
    assert keys_read("peer.usable_byte", "peer") - NAMES["peer"] == {"usable_byte"}
