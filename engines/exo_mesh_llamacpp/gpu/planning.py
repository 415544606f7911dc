"""Plans which layers of a stage go onto the GPUs of the library."""

from __future__ import annotations

import ctypes
import logging

import msgspec

from exo_mesh.errors import InputError
from exo_mesh_llamacpp.devices import BackendDevice, chosen_gpus
from exo_mesh_llamacpp.gpu.offload import Offload, StageNeeds, attempts
from exo_mesh_llamacpp.layouts import ModelParams
from exo_mesh_llamacpp.library import Library
from exo_mesh_llamacpp.options import LlamaCppOptions
from exo_mesh_llamacpp.plan import ModelSource, head_tensors
from exo_mesh_llamacpp.types import KV_TYPES

logger = logging.getLogger(__name__)

_SPLIT_LENGTH = 16
"""Fewest values of an array of shares: llama_max_devices."""


class GpuPlan(msgspec.Struct, frozen=True):
    """The GPUs of a stage, and how many layers to try there, one number after another. has_gpu: of the library."""

    gpus: tuple[BackendDevice, ...] = ()
    tries: tuple[Offload, ...] = (Offload(),)
    has_gpu: bool = False

    def apply(self, params: ModelParams, offload: Offload) -> object:
        """Set the devices and their layers in the parameters of a load. Returns what must live until the load has
        ended. A library without a GPU keeps its defaults."""
        if not self.has_gpu:
            return None
        params.n_gpu_layers = offload.layers
        # A GPU that is named gets buffers, and computes long prompts for the layers of the CPU too.
        shares = offload.shares or (offload.layers,) * len(self.gpus)
        used = [(gpu.handle, share) for gpu, share in zip(self.gpus, shares, strict=True) if share]
        handles = (ctypes.c_void_p * (len(used) + 1))(*(handle for handle, _ in used), None)
        params.devices = ctypes.addressof(handles)
        if not offload.shares:
            return handles
        split = (ctypes.c_float * max(_SPLIT_LENGTH, len(used)))(*(share for _, share in used))
        params.tensor_split = ctypes.addressof(split)
        return handles, split

    def __str__(self) -> str:
        where = ", ".join(f"{gpu.name} ({gpu.memory})" for gpu in self.gpus)
        return f"{self.tries[0].layers} layers, with the head as one, on {where or 'no GPU'}"


def plan_gpus(
    library: Library, options: LlamaCppOptions, source: ModelSource, span: tuple[int, int], cells: int, kv: str
) -> GpuPlan:
    """Plan for layers `[start, stop)`. cells: positions of the longest sequence; kv: the type of keys and values.
    Raises InputError for a device that the library does not have."""
    devices = library.devices()
    gpus = chosen_gpus(devices, options.device)
    has_gpu = any(device.is_gpu for device in devices)
    if options.gpu_layers and not gpus:
        why = "name the GPUs with option device" if has_gpu else f"{library.build} has no GPU"
        raise InputError(f"gpu_layers={options.gpu_layers}: {why}", param="gpu_layers")
    if not gpus:
        if options.device and options.device != ("cpu",):
            logger.warning("device=%s is not there; layers are computed on the CPU", "+".join(options.device))
        return GpuPlan(has_gpu=has_gpu)
    if options.gpu_layers is not None:
        return GpuPlan(gpus, (Offload(options.gpu_layers),), has_gpu)
    tries = attempts(_needs(source, span, cells, kv), [_free_bytes(gpu, devices) for gpu in gpus])
    return GpuPlan(gpus, tries, has_gpu)


def _free_bytes(gpu: BackendDevice, devices: tuple[BackendDevice, ...]) -> int:
    """The free bytes of a GPU; for a GPU that reports no memory: the CPU's free bytes, as llama.cpp does."""
    if gpu.total_bytes:
        return gpu.free_bytes
    return next((device.free_bytes for device in devices if device.kind == "cpu"), 0)


def _needs(source: ModelSource, span: tuple[int, int], cells: int, kv: str) -> StageNeeds:
    kind = KV_TYPES[kv]
    layers = tuple(
        sum(tensor.num_bytes for tensor in source.layer(index))
        + cells * source.kv_values[index] * kind.block_bytes // kind.block
        + 4 * source.kv_fixed[index]
        for index in range(*span)
    )
    is_last = span[1] == source.num_layers
    return StageNeeds(layers, sum(tensor.num_bytes for tensor in head_tensors(source)) if is_last else 0)
