"""The settings of this engine, as `--engine-option key=value` gives them. Without NumPy or the library."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from exo_mesh.errors import InputError
from exo_mesh_llamacpp.types import KV_TYPES, QUANTS

OPTIONS = ("quant", "kv", "flash", "unified", "share", "threads", "gpu_layers", "device", "library")
MAX_THREADS = 512
MAX_GPU_LAYERS = 10_000
MAX_DEVICES = 16


class LlamaCppOptions(msgspec.Struct, frozen=True):
    """The parsed options.

    quant: the type that matrices of a checkpoint are quantised to while loading; "" keeps theirs. kv: the type of keys
    and values; "" for the default. flash: flash attention. unified: one pool of cells for all sequences. share: whether
    sequences hold a common beginning together; "auto": on the CPU. threads: 0 for the default. gpu_layers: layers that
    the library puts on GPUs, counted from the last one; None for as many as fit. device: names of GPUs or of their
    backends in lower case, or "cpu"; () for the default.
    """

    quant: str = ""
    kv: str = ""
    flash: bool = False
    unified: bool = False
    share: str = "auto"
    threads: int = 0
    gpu_layers: int | None = None
    device: tuple[str, ...] = ()

    def kv_type(self, mixed: bool) -> str:
        """The type of keys and values. mixed: the ring has stages of other engines, which keep float32."""
        return self.kv or ("f32" if mixed else "f16")

    def with_default_device(self, is_asked: bool) -> LlamaCppOptions:
        """The same, on the CPU if no device is named. is_asked: see LibraryFile. On macOS nothing changes: Metal is the
        default there."""
        return self if self.device or is_asked or sys.platform == "darwin" else replace(self, device=("cpu",))

    @property
    def num_threads(self) -> int:
        return self.threads or default_threads()


def parse_options(options: Mapping[str, str]) -> LlamaCppOptions:
    """Parse the engine options. Raises InputError for an unknown option or value."""
    for name in options:
        if name not in OPTIONS:
            raise InputError(
                f"the llamacpp engine has no option {json.dumps(name)}; it has {', '.join(OPTIONS)}", param=name
            )
    parsed = LlamaCppOptions(
        quant=_one_of(options, "quant", ("", *QUANTS)),
        kv=_one_of(options, "kv", ("", *KV_TYPES)),
        flash=_one_of(options, "flash", ("off", "on")) == "on",
        unified=_one_of(options, "unified", ("off", "on")) == "on",
        share=_one_of(options, "share", ("auto", "on", "off")),
        threads=_number(options, "threads", 0, 1, MAX_THREADS),
        gpu_layers=_gpu_layers(options),
        device=parse_device(options),
    )
    if parsed.kv in ("q8_0", "q4_0") and not parsed.flash:
        raise InputError(f"kv={parsed.kv} needs flash=on", param="kv")
    return parsed


def parse_device(options: Mapping[str, str]) -> tuple[str, ...]:
    """Option `device`: "auto", "cpu", or names joined by "+"; the last of them may be "cpu". Raises InputError."""
    value = options.get("device", "auto").lower()
    if value == "auto":
        return ()
    names = tuple(dict.fromkeys(value.split("+")))
    if (
        len(names) > MAX_DEVICES
        or "cpu" in names[:-1]
        or not all(re.fullmatch(r"[a-z][a-z0-9_:.-]{0,63}", n) for n in names)
    ):
        raise InputError(
            f"device={json.dumps(value)} is not auto, cpu, or names of GPUs joined by +, as in cuda0+cuda1",
            param="device",
        )
    return names


def _gpu_layers(options: Mapping[str, str]) -> int | None:
    if options.get("gpu_layers", "auto") in ("auto", ""):
        return None
    return _number(options, "gpu_layers", 0, 0, MAX_GPU_LAYERS)


def default_threads() -> int:
    """The cores that this process may use: as many as in the programs of llama.cpp. The threads wait for each
    other, so while other programs need a core, fewer compute: see FreeCores."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return len({_core_of(cpu) for cpu in usable})


def _core_of(cpu: int) -> str:
    """A name for the core of a CPU; the same for hyper-threads of one core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)


def _one_of(options: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    value = options.get(name, known[0])
    if value not in known:
        raise InputError(
            f"{name}={json.dumps(value)} is not known; it may be {', '.join(word for word in known if word)}",
            param=name,
        )
    return value


def _number(options: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    value = options.get(name, "")
    if not value:
        return default
    if not value.isdecimal() or len(value) > 9 or not least <= int(value) <= most:
        raise InputError(f"{name}={json.dumps(value)} is not a number from {least} to {most}", param=name)
    return int(value)
