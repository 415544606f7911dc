"""The devices that a llama.cpp library computes on, and which of them a stage uses."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from exo_mesh.engine.contract import Compute
from exo_mesh.errors import InputError

MAX_DEVICES = 64
"""Most devices that are asked about; GGML knows 16 per backend."""

_KINDS = ("cpu", "gpu", "integrated gpu", "accelerator")
"""enum ggml_backend_dev_type, from 0 on."""

_COMPUTES: dict[str, Compute] = {
    "cuda": "cuda",
    "musa": "cuda",
    "rocm": "rocm",
    "hip": "rocm",
    "vulkan": "vulkan",
    "metal": "metal",
    "mtl": "metal",
    "sycl": "xpu",
}
"""By the name of a backend, which a device's name begins with: what capability tags call it."""


class BackendDevice(msgspec.Struct, frozen=True):
    """A device of a library. handle: its address in this process. name: such as "CUDA0"; description: of the hardware.
    kind: one of _KINDS, or "other"."""

    handle: int
    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int

    @property
    def is_gpu(self) -> bool:
        return self.kind in ("gpu", "integrated gpu")

    @property
    def memory(self) -> str:
        return f"{self.free_bytes / 1e9:.1f} of {self.total_bytes / 1e9:.1f} GB free"

    @property
    def backend(self) -> str:
        """The name without its number, in lower case: such as "cuda"."""
        return self.name.rstrip("0123456789").lower()

    @property
    def compute(self) -> Compute:
        """What the capability tag of an engine on this device ends with; "cpu" for a backend without one."""
        return _COMPUTES.get(self.backend, "cpu") if self.is_gpu else "cpu"


def list_devices(call: Any) -> tuple[BackendDevice, ...]:
    """All devices of a library, in its order, with their memory now. call: its declared functions."""
    return tuple(
        _device(call, call.ggml_backend_dev_get(index))
        for index in range(min(call.ggml_backend_dev_count(), MAX_DEVICES))
    )


def _device(call: Any, handle: int) -> BackendDevice:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    kind = call.ggml_backend_dev_type(handle)
    return BackendDevice(
        handle,
        _text(call.ggml_backend_dev_name(handle)),
        _text(call.ggml_backend_dev_description(handle)),
        _KINDS[kind] if 0 <= kind < len(_KINDS) else "other",
        min(free.value, total.value),
        total.value,
    )


def _text(name: bytes | None) -> str:
    return (name or b"").decode(errors="replace").strip()


def chosen_gpus(devices: Sequence[BackendDevice], wanted: tuple[str, ...]) -> tuple[BackendDevice, ...]:
    """The GPUs that option `device` names, by their own names or their backends'; () for "cpu".

    wanted: () for the default: all graphics cards, or without any the first GPU that shares the system's memory. That
    is also what llama.cpp takes. A last name "cpu" allows that some of the others, or all, are not there; without it,
    raises InputError for a name that no GPU has.
    """
    gpus = [device for device in devices if device.is_gpu]
    if not wanted:
        return tuple(device for device in gpus if device.kind == "gpu") or tuple(gpus[:1])
    names = [name for name in wanted if name != "cpu"]
    found = {name: [one for one in gpus if name in (one.name.lower(), one.backend)] for name in names}
    for name, named in found.items():
        if not named and names == list(wanted):
            there = ", ".join(device.name for device in devices) or "none"
            raise InputError(
                f"device={json.dumps(name)}: the library has no such device; it has {there}", param="device"
            )
    return tuple(dict.fromkeys(device for named in found.values() for device in named))
