"""Chooses the device and dtype of a stage: by the operator's options, else by what the machine is good at."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from exo_mesh.engine.free_cores import ThreadsByLoad
from exo_mesh.errors import InputError
from exo_mesh_torch.options import DTYPE_NAMES, SHORT_DTYPES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU flags of x86 and Arm for native bfloat16 multiplication. Without it, torch widens weights each time."""


def choose_device(options: Mapping[str, str]) -> torch.device:
    """Option `device` (cpu, cuda, cuda:1, xpu, mps), else a GPU if torch sees one. Raises InputError."""
    wanted = options.get("device", "auto")
    if wanted == "auto":
        return next((torch.device(name) for name in ("cuda", "xpu", "mps") if _is_there(name)), torch.device("cpu"))
    try:
        device = torch.device(wanted)
    except RuntimeError as exc:
        raise InputError(f"option device={json.dumps(wanted)} is not a device of torch", param="device") from exc
    if device.type != "cpu" and not _is_there(device.type):
        raise InputError(f"option device={json.dumps(wanted)}: torch sees no such device", param="device")
    return device


def choose_dtype(options: Mapping[str, str], checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """Option `dtype`, else the checkpoint's; float32 on CPUs that cannot multiply that dtype. options: checked.

    Measured with one thread of an AMD EPYC with AVX-512 BF16 and a 125 M Llama: bfloat16 prefills 2.9 times and decodes
    1.3 times as fast as float32. float16 prefills a ninth as fast as bfloat16.
    """
    wanted = options.get("dtype", "auto")
    if wanted != "auto":
        return DTYPES[SHORT_DTYPES.get(wanted, wanted)]
    if device.type != "cpu":
        return DTYPES.get(checkpoint_dtype, torch.bfloat16)
    return torch.bfloat16 if checkpoint_dtype == "bfloat16" and has_fast_bfloat16(cpu_flags()) else torch.float32


def set_threads(options: Mapping[str, str], device: torch.device) -> ThreadsByLoad:
    """Set torch's threads by option `threads`, else to the cores that this process may use; these follow the load of
    the machine, but not with batching=off, because bits depend on them. Raises InputError."""
    wanted = options.get("threads", "auto")
    if wanted == "auto":
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = min(count, torch.get_num_threads())  # torch counts cores, not hyper-threads; OMP_NUM_THREADS limits it
    else:
        count = int(wanted)
    torch.set_num_threads(count)
    follows = device.type == "cpu" and wanted == "auto" and wants_batching(options)
    return ThreadsByLoad(count if follows else 1, torch.set_num_threads)


def wants_batching(options: Mapping[str, str]) -> bool:
    """Option `batching`: on (decode rows in one forward) or off (each alone: the bits do not depend on the others)."""
    return options.get("batching", "on") == "on"


def has_fast_bfloat16(flags: frozenset[str]) -> bool:
    return bool(flags & _BF16_FLAGS)


def cpu_flags() -> frozenset[str]:
    """CPU flags in /proc/cpuinfo; empty if there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def _is_there(kind: str) -> bool:
    if kind == "mps":
        return bool(torch.backends.mps.is_available())
    module = getattr(torch, kind, None)
    return bool(module is not None and module.is_available())
