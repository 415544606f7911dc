"""Layers of a stage go onto the GPUs of a llama.cpp library as far as they fit. The GPUs here are simulated."""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exo_mesh_llamacpp import canary, devices, provider
from exo_mesh_llamacpp.devices import BackendDevice, chosen_gpus, list_devices
from exo_mesh_llamacpp.gpu import probe
from exo_mesh_llamacpp.gpu.offload import RESERVE_BYTES, Offload, StageNeeds, attempts, share_layers
from exo_mesh_llamacpp.gpu.planning import GpuPlan
from exo_mesh_llamacpp.layouts import ModelParams
from exo_mesh_llamacpp.library import Library, open_library
from exo_mesh_llamacpp.library_file import packaged_library
from exo_mesh_llamacpp.options import parse_options
from msgspec.structs import replace

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest
from exo_mesh.engine.registry import Registry
from exo_mesh.errors import EngineError, InputError, ModelError
from tests.support.checkpoints import TinyModel, write_checkpoint

needs_library = pytest.mark.skipif(not provider.availability().available, reason="xllamacpp is not installed")

GB = 10**9

TABLE: tuple[tuple[bytes, bytes, int, int, int], ...] = (
    (b"CUDA0", b"NVIDIA A", 1, 20 * GB, 24 * GB),
    (b"CUDA1", b"NVIDIA B", 1, 6 * GB, 8 * GB),
    (b"Vulkan0", b"NVIDIA A", 1, 20 * GB, 24 * GB),
    (b"Vulkan1", b"Graphics of the processor", 2, 30 * GB, 32 * GB),
    (b"CPU", b"Processor", 0, 64 * GB, 64 * GB),
    (b"Odd", b"", 9, 0, 0),
)


class StubCall:
    """The functions of a library that has the devices of a table. Handles are 100, 101, …"""

    def __init__(self, table: tuple[tuple[bytes, bytes, int, int, int], ...] = TABLE) -> None:
        self._table = table

    def ggml_backend_dev_count(self) -> int:
        return len(self._table)

    def ggml_backend_dev_get(self, index: int) -> int:
        return 100 + index

    def ggml_backend_dev_name(self, handle: int) -> bytes:
        return self._table[handle - 100][0]

    def ggml_backend_dev_description(self, handle: int) -> bytes:
        return self._table[handle - 100][1]

    def ggml_backend_dev_type(self, handle: int) -> int:
        return self._table[handle - 100][2]

    def ggml_backend_dev_memory(self, handle: int, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = self._table[handle - 100][3:]


def test_devices_are_read_with_their_kind_backend_and_memory() -> None:
    found = list_devices(StubCall())
    assert [(one.name, one.kind, one.backend, one.compute) for one in found] == [
        ("CUDA0", "gpu", "cuda", "cuda"),
        ("CUDA1", "gpu", "cuda", "cuda"),
        ("Vulkan0", "gpu", "vulkan", "vulkan"),
        ("Vulkan1", "integrated gpu", "vulkan", "vulkan"),
        ("CPU", "cpu", "cpu", "cpu"),
        ("Odd", "other", "odd", "cpu"),
    ]
    assert found[1] == BackendDevice(101, "CUDA1", "NVIDIA B", "gpu", 6 * GB, 8 * GB)


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("auto", ["CUDA0", "CUDA1", "Vulkan0"]),
        ("cpu", []),
        ("CUDA1", ["CUDA1"]),
        ("cuda", ["CUDA0", "CUDA1"]),
        ("vulkan1+cuda", ["Vulkan1", "CUDA0", "CUDA1"]),
        ("rocm+cpu", []),
        ("rocm+vulkan0+cpu", ["Vulkan0"]),
    ],
)
def test_an_option_names_devices_or_backends(option: str, names: list[str]) -> None:
    wanted = parse_options({"device": option}).device
    assert [device.name for device in chosen_gpus(list_devices(StubCall()), wanted)] == names


def test_an_integrated_gpu_is_used_if_there_is_no_card() -> None:
    assert [one.name for one in chosen_gpus(list_devices(StubCall(TABLE[3:])), ())] == ["Vulkan1"]
    assert chosen_gpus(list_devices(StubCall(TABLE[4:])), ()) == ()


@pytest.mark.parametrize("option", ["rocm", "cuda7", "cuda+rocm"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(option: str) -> None:
    with pytest.raises(InputError, match="it has CUDA0, CUDA1, Vulkan0"):
        chosen_gpus(list_devices(StubCall()), parse_options({"device": option}).device)


@pytest.mark.parametrize("option", ["", "+", "cpu+cuda", "0", "a b", "+".join(f"cuda{n}" for n in range(17))])
def test_what_names_no_device_is_refused(option: str) -> None:
    with pytest.raises(InputError, match="device="):
        parse_options({"device": option})


@pytest.mark.parametrize(("value", "layers"), [("auto", None), ("0", 0), ("12", 12)])
def test_the_number_of_layers_on_gpus_is_automatic_or_given(value: str, layers: int | None) -> None:
    assert parse_options({"gpu_layers": value}).gpu_layers == layers
    assert parse_options({}).gpu_layers is None


def free(usable: int) -> int:
    """Free bytes of a GPU of which a stage may use `usable`."""
    return -(-(usable + RESERVE_BYTES) * 10 // 9) if usable else 0


def shared(needs: StageNeeds, usable: Sequence[int], most: int | None = None) -> tuple[int, ...]:
    return share_layers(needs, [free(one) for one in usable], most).shares


@pytest.mark.parametrize(
    ("usable", "count"),
    [(0, 0), (99, 0), (100, 1), (110, 2), (119, 2), (120, 3), (139, 4), (140, 5), (10**12, 5)],
)
def test_the_head_goes_first_and_then_layers_from_the_last_on(usable: int, count: int) -> None:
    assert share_layers(StageNeeds((10, 10, 10, 10), head=100), [free(usable)]).layers == count


def test_several_gpus_are_filled_alike() -> None:
    needs = StageNeeds((10,) * 8)
    assert shared(needs, [1000, 1000]) == (4, 5), "the head of a stage that is not the last is empty"
    assert shared(needs, [60, 20]) == (6, 3)
    assert shared(needs, [20, 29]) == (2, 3)
    assert shared(needs, [20, 0, 29]) == (2, 0, 3)
    assert shared(StageNeeds((10, 10), head=50), [50, 20]) == (1, 0), "the head fits on the first GPU only"
    assert shared(needs, [1000], most=3) == (3,)


def test_nothing_goes_onto_full_gpus() -> None:
    assert share_layers(StageNeeds((10, 10)), []) == Offload()
    assert share_layers(StageNeeds((10, 10)), [free(9), free(9)]) == Offload()
    assert share_layers(StageNeeds((), 10), [10**12]) == Offload(1, (1,))


def most_in_any_way(sizes: Sequence[int], rooms: Sequence[int]) -> int:
    """The most of the last sizes that fit into rooms in order, by trying every share of each room."""
    counts = (
        shares
        for shares in itertools.product(range(len(sizes) + 1), repeat=len(rooms))
        if sum(shares) <= len(sizes)
        and all(used <= room for used, room in zip(loads(sizes, shares), rooms, strict=True))
    )
    return max(sum(shares) for shares in counts)


def loads(sizes: Sequence[int], shares: Sequence[int]) -> list[int]:
    """The bytes in each room."""
    ends = list(itertools.accumulate(shares, initial=len(sizes) - sum(shares)))
    return [sum(sizes[start:stop]) for start, stop in itertools.pairwise(ends)]


@pytest.mark.parametrize("seed", range(60))
def test_no_other_way_puts_more_layers_onto_gpus(seed: int) -> None:
    rng = random.Random(seed)
    layers = tuple(rng.randrange(1, 50) for _ in range(rng.randrange(1, 7)))
    needs = StageNeeds(layers, rng.choice([0, rng.randrange(1, 100)]))
    rooms = [rng.randrange(1, 200) for _ in range(rng.randrange(1, 4))]
    offload = share_layers(needs, [free(room) for room in rooms])
    most = most_in_any_way((*layers, needs.head), rooms)
    assert offload.layers == (most if most > (needs.head == 0) else 0)
    assert offload.layers == sum(offload.shares)
    if offload.layers:
        used = loads((*layers, needs.head), offload.shares)
        assert all(one <= room for one, room in zip(used, rooms, strict=True))


def test_a_full_gpu_gets_fewer_layers() -> None:
    needs = StageNeeds((10,) * 32, head=10)
    assert [one.layers for one in attempts(needs, [10**12])] == [33, 16, 0]
    assert [one.layers for one in attempts(needs, [free(19)])] == [1, 0]
    assert attempts(needs, [0]) == (Offload(),)


def test_the_named_devices_are_given_to_the_library() -> None:
    gpus = chosen_gpus(list_devices(StubCall()), ("cuda",))
    plan = GpuPlan(gpus, has_gpu=True)
    params = ModelParams()
    kept = [plan.apply(params, Offload(5))]
    assert params.n_gpu_layers == 5 and not params.tensor_split
    assert list((ctypes.c_void_p * 3).from_address(params.devices)) == [100, 101, None]
    kept.append(plan.apply(params, Offload(5, (2, 3))))
    assert list((ctypes.c_float * 3).from_address(params.tensor_split)) == [2, 3, 0]
    kept.append(plan.apply(params, Offload(5, (0, 5))))
    assert list((ctypes.c_void_p * 2).from_address(params.devices)) == [101, None]
    assert (ctypes.c_float * 1).from_address(params.tensor_split)[0] == 5
    kept.append(plan.apply(params, Offload()))
    assert list((ctypes.c_void_p * 1).from_address(params.devices)) == [None]
    assert params.n_gpu_layers == 0
    del kept


def test_a_library_without_gpus_keeps_its_defaults() -> None:
    params = ModelParams()
    assert GpuPlan().apply(params, Offload()) is None
    assert bytes(params) == bytes(ModelParams())


class StubLibrary:
    """A library whose GPU has no room for more than `most` layers."""

    def __init__(self, most: int, error: str) -> None:
        self.call, self.most, self.error, self.tried = self, most, error, list[int]()

    def llama_model_default_params(self) -> ModelParams:
        return ModelParams()

    def forget_log(self) -> None:
        pass

    def last_error(self) -> str:
        return self.error

    def load(self, params: ModelParams) -> int | None:
        self.tried.append(params.n_gpu_layers)
        return 7 if params.n_gpu_layers <= self.most else None


def test_a_load_onto_a_full_gpu_is_tried_with_fewer_layers(caplog: pytest.LogCaptureFixture) -> None:
    from exo_mesh_llamacpp.model import _load_where_it_fits

    halving = GpuPlan(tries=(Offload(33), Offload(16), Offload()), has_gpu=True)
    full = StubLibrary(10, "cudaMalloc failed: out of memory")
    with caplog.at_level(logging.WARNING):
        assert _load_where_it_fits(full, full.load, halving) == 7  # type: ignore[arg-type]
    assert full.tried == [33, 16, 0]
    assert "33 layers do not fit on the GPUs (cudaMalloc failed: out of memory); trying 16" in caplog.text
    wrong = StubLibrary(10, "unknown model architecture")
    with pytest.raises(ModelError, match="unknown model architecture"):
        _load_where_it_fits(wrong, wrong.load, halving)  # type: ignore[arg-type]
    assert wrong.tried == [33]
    fixed = StubLibrary(10, "unable to allocate CUDA0 buffer")
    with pytest.raises(ModelError, match="unable to allocate"):
        _load_where_it_fits(fixed, fixed.load, GpuPlan(tries=(Offload(33),), has_gpu=True))  # type: ignore[arg-type]
    assert fixed.tried == [33]


@needs_library
def test_a_library_with_a_gpu_gives_the_node_its_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(library: str) -> tuple[BackendDevice, ...]:
        asked.append(library)
        return list_devices(StubCall())

    monkeypatch.setattr("exo_mesh_llamacpp.gpu.probe._ask", answer)
    registry = Registry({"llamacpp": provider}, {})
    plain = registry.configured("llamacpp", {"kv": "f32"}).providers["llamacpp"].availability()
    assert plain.compute == provider.availability().compute
    assert not asked, "without the options nothing is opened"
    looks = {
        device: registry.configured(engine, {"device": device}).providers["llamacpp"].availability()
        for device, engine in {"vulkan": "auto", "cuda1": "llamacpp", "rocm+cpu": "auto", "rocm": "auto"}.items()
    }
    assert [looks[name].compute for name in ("vulkan", "cuda1", "rocm+cpu")] == ["vulkan", "cuda", "cpu"]
    assert "CUDA1 (NVIDIA B, 6.0 of 8.0 GB free)" in looks["cuda1"].reason
    assert looks["cuda1"].preference > looks["rocm+cpu"].preference
    assert not looks["rocm"].available and "no such device" in looks["rocm"].reason
    assert registry.configured("torch", {"device": "rocm"}).providers["llamacpp"] is provider


@needs_library
def test_the_real_library_is_asked_in_a_process_of_its_own() -> None:
    look = provider.configured({"device": "cuda+cpu"}).availability()
    assert look.available and look.compute == "cpu" and "CPU" in look.reason
    refused = provider.configured({"device": "cuda"}).availability()
    assert not refused.available and "it has CPU" in refused.reason


def test_a_file_that_is_no_library_makes_the_engine_unavailable(tmp_path: Path) -> None:
    (tmp_path / "none.so").write_bytes(b"no library")
    look = provider.configured({"library": str(tmp_path / "none.so")}).availability()
    assert not look.available and "none.so is not a library" in look.reason


@needs_library
def test_devices_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    probe.main("{}")
    found = [BackendDevice(**one) for one in json.loads(capsys.readouterr().out)["devices"]]
    assert [one.kind for one in found if one.name == "CPU"] == ["cpu"]
    assert found[0].total_bytes >= found[0].free_bytes > 0
    assert len(found) <= devices.MAX_DEVICES


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """The real library, which takes the device of the processor for two GPUs of its own."""
    library = open_library(packaged_library())
    cpu = next(device for device in library.devices() if device.name == "CPU")
    gpus = tuple(replace(cpu, name=f"GPU{index}", kind="gpu") for index in range(2))
    monkeypatch.setattr(Library, "devices", lambda self: (*gpus, cpu))
    monkeypatch.setattr(canary, "_verdicts", {})
    yield library


@needs_library
@pytest.mark.parametrize("device", ["gpu0", "gpu", "auto", "cpu"])
def test_a_model_in_parts_gives_the_same_bits_on_every_device(two_gpus: Library, device: str) -> None:
    for arch in ("llama", "gemma3", "lfm2"):
        assert canary.defect(two_gpus, arch, {"device": device}) == ""


@needs_library
def test_the_log_says_how_many_layers_go_onto_which_gpus(
    two_gpus: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = provider.create()
    directory = write_checkpoint(tmp_path, TinyModel(layers=4))
    with caplog.at_level(logging.DEBUG, "exo_mesh_llamacpp"):
        stage.load(LoadRequest(Shard("tiny", 0, 2, 4), directory, 64, {"device": "gpu"}), lambda done, total: None)
    stage.close()
    assert "tiny[0:2/4]: 3 layers, with the head as one, on GPU0 (" in caplog.text


@needs_library
def test_each_device_is_tried_before_its_first_use(two_gpus: Library, tmp_path: Path) -> None:
    asked: list[str] = []
    directory = write_checkpoint(tmp_path, TinyModel(layers=2))

    def bad(library: Library, arch: str, options: dict[str, str]) -> str:
        asked.append(options["device"])
        return "it differs" if options["device"] == "GPU1" else ""

    def load(**options: str) -> None:
        stage = provider.create()
        try:
            stage.load(LoadRequest(Shard("tiny", 0, 2, 2), directory, 64, options), lambda done, total: None)
        finally:
            stage.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canary, "defect", bad)
        load(device="cpu")
        load(device="gpu0")
        load(device="gpu0")
        assert asked == ["cpu", "GPU0"]
        with pytest.raises(EngineError, match="not used for llama on GPU1: it differs; use --engine-option device=cpu"):
            load(device="gpu")
        with pytest.raises(EngineError, match="GPU1"):
            load(device="gpu1")
        assert asked == ["cpu", "GPU0", "GPU1"]


@needs_library
def test_small_differences_count_only_where_a_device_repeats_its_bits(
    two_gpus: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = canary._logits
    added: list[float] = []

    def rough(stages: Any, cuts: Any, count: int, directory: Path, options: Any) -> np.ndarray:
        return real(stages, cuts, count, directory, options) + added.pop(0)

    monkeypatch.setattr(canary, "_logits", rough)
    small = 1e-5
    for device, noise, right in (
        ("gpu0", [0, small, 0], False),
        ("gpu0", [0, small, -small], True),
        ("gpu0", [0, 1.0, -small], False),
        ("cpu", [0, small, -small], False),
    ):
        added[:] = noise
        assert (canary.defect(two_gpus, "llama", {"device": device}) == "") == right


@needs_library
def test_gpus_of_the_wheel_are_used_only_if_they_are_named(
    two_gpus: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node does not open the wheel's library, so it would not know of the memory there."""
    directory = write_checkpoint(tmp_path, TinyModel(layers=2))

    def load(**options: str) -> str:
        caplog.clear()
        stage = provider.create()
        with caplog.at_level(logging.INFO, "exo_mesh_llamacpp"):
            stage.load(LoadRequest(Shard("tiny", 0, 2, 2), directory, 64, options), lambda done, total: None)
        stage.close()
        return caplog.text

    monkeypatch.setattr(canary, "defect", lambda *_: "")
    monkeypatch.setattr("sys.platform", "linux")
    assert "GPU0" not in load()
    assert "GPU0" in load(device="gpu")
    with pytest.raises(InputError, match="name the GPUs with option device"):
        load(gpu_layers="2")
    assert "GPU0" in load(library=str(two_gpus.fingerprint)), "a library that is named is asked"
    monkeypatch.setattr("sys.platform", "darwin")
    assert "GPU0" in load()
