"""Which engines a peer would run a model with, and what it says that they compute on."""

from __future__ import annotations

import platform

import pytest
from msgspec.structs import replace

from exo_mesh.domain.device import Device, EngineInfo, PeerInfo
from exo_mesh.engine.contract import Availability
from exo_mesh.engine.registry import Registry
from exo_mesh.machine.accelerators import Accelerator
from exo_mesh.machine.memory import MemoryReading
from exo_mesh.machine.this_machine import device, engines_for, shown_compute


class Provider:
    kind = "stage"

    def __init__(self, name: str, look: Availability, *architectures: str) -> None:
        self.name = name
        self._look = look
        self._architectures = architectures

    def availability(self) -> Availability:
        return self._look

    def supports(self, architecture: str) -> bool:
        return not self._architectures or architecture in self._architectures

    def version(self) -> str:
        return "7"

    def create(self) -> None:
        raise NotImplementedError


def registry() -> Registry:
    providers = (
        Provider("quick", Availability(True, "", preference=90), "llama"),
        Provider("broad", Availability(True, "", preference=50)),
        Provider("absent", Availability(False, "", preference=99)),
        Provider("made-up", Availability(True, "", preference=-1, dtypes=())),
    )
    return Registry({provider.name: provider for provider in providers}, {})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("preference", "wanted", "architecture", "expected"),
    [
        ("auto", None, "llama", ("quick", "broad")),
        ("auto", None, "gemma", ("broad",)),
        ("auto", "broad", "llama", ("broad", "quick")),
        ("auto", "absent", "llama", ("quick", "broad")),
        ("auto", "made-up", "llama", ("made-up", "quick", "broad")),
        ("broad", None, "llama", ("broad",)),
        ("quick", None, "gemma", ("broad",)),
        ("quick", "broad", "llama", ("broad", "quick")),
        ("made-up", None, "gemma", ("made-up",)),
    ],
)
def test_a_named_engine_is_used_wherever_it_can_and_others_for_the_rest(
    preference: str, wanted: str | None, architecture: str, expected: tuple[str, ...]
) -> None:
    assert engines_for(registry(), preference, wanted, architecture) == expected


@pytest.mark.parametrize(
    ("compute", "files", "shown"),
    [
        ("cpu", (), "cpu"),
        ("cuda", (), "cpu"),
        ("cuda", ("/dev/nvidia0",), "cuda"),
        ("rocm", ("/dev/nvidia0",), "cpu"),
        ("rocm", ("/dev/kfd",), "rocm"),
        ("xpu", ("/dev/dri",), "xpu"),
        ("vulkan", (), "cpu"),
        ("vulkan", ("/dev/dri",), "vulkan"),
        ("vulkan", ("/dev/nvidia0",), "vulkan"),
        ("npu", (), "npu"),
    ],
)
def test_no_gpu_is_claimed_without_one(compute: str, files: tuple[str, ...], shown: str) -> None:
    look = Availability(True, "", compute=compute)  # type: ignore[arg-type]
    assert shown_compute(look, files.__contains__) == shown


def test_metal_is_claimed_on_a_mac_only(monkeypatch: pytest.MonkeyPatch) -> None:
    look = Availability(True, "", compute="metal")
    for system, shown in (("Darwin", "metal"), ("Linux", "cpu")):
        monkeypatch.setattr(platform, "system", lambda system=system: system)
        assert shown_compute(look) == shown


def peer(*devices: Device) -> PeerInfo:
    return PeerInfo("p", 1, "n", "1", 2, "default", (), devices=devices)


def test_tags_name_engines_with_what_they_compute_on_and_the_dtypes_they_take() -> None:
    found = device(registry(), "auto", lambda compute: Accelerator("cpu", "x", MemoryReading(1, 1)))
    assert found.engine == "quick" and found.engines == ("broad", "made-up", "quick")
    assert peer(found).tags == (
        "quick", "broad", "made-up", "broad-cpu", "made-up-cpu", "quick-cpu", "act:v1",
        "dtype:f32", "dtype:bf16", "dtype:f16",
    )  # fmt: skip
    only = Device("cpu", "x", ("made-up",), "made-up", 1, (EngineInfo("made-up", "cpu"),))
    assert peer(only).tags == ("made-up", "made-up-cpu"), "an engine that stands in no ring with others has no format"


def test_a_peer_of_an_older_version_has_one_engine_for_every_model() -> None:
    old = peer(Device("gpu", "x", ("broad", "quick"), "quick"))
    assert old.tags == ("quick", "broad") and old.engines_for("any") == ("quick",)
    new = replace(old, model_engines=(("some", ("broad", "quick")), ("none", ())))
    assert new.engines_for("some") == ("broad", "quick")
    assert new.engines_for("none") == new.engines_for("other") == ("quick",)
