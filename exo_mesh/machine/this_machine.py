"""Describes this machine: its addresses, its device, and which engines can run here."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection

from exo_mesh.domain.addresses import LINK_WORDS, advertised
from exo_mesh.domain.device import Device, EngineInfo
from exo_mesh.engine.contract import Availability, Compute
from exo_mesh.engine.registry import Registry
from exo_mesh.errors import MeshError
from exo_mesh.machine.accelerators import Accelerator
from exo_mesh.machine.interfaces import read_interfaces

_DEVICE_NODES = {
    "cuda": ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvmap", "/dev/dxg"),
    "rocm": ("/dev/kfd", "/dev/dxg"),
    "vulkan": ("/dev/dri", "/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"),
    "xpu": ("/dev/dri",),
}
"""Files by GPU type; one of them exists if the system has such a GPU: of its driver, of a Jetson's, of WSL's."""


def addresses(host: str, port: int, types: Collection[str] = ()) -> tuple[str, ...]:
    """Returns the "host:port" addresses of a server bound to `host`, best first. types: the kinds of interfaces to use,
    as in LINK_WORDS; () for all."""
    kinds = {LINK_WORDS[word] for word in types}
    return advertised(host, port, [item for item in read_interfaces() if not kinds or item.kind in kinds])


def device(registry: Registry, preference: str, find: Callable[[Compute], Accelerator]) -> Device:
    """Blocking. Describes this machine with every engine that can run on it; `engine` is "" if none can be chosen.

    find: returns the accelerator that the chosen engine computes on.
    """
    stage_engines = {name: found for name, found in registry.providers.items() if found.kind == "stage"}
    able = sorted(name for name, found in stage_engines.items() if found.availability().available)
    try:
        chosen = registry.choose(preference).name
    except MeshError:
        chosen = ""
    found = find(shown_compute(registry.providers[chosen].availability()) if chosen else "cpu")
    details = tuple(engine_info(registry, engine) for engine in able)
    cores, memory = os.cpu_count() or 0, found.memory
    return Device(found.kind, found.name, tuple(able), chosen, cores, details, memory.total_bytes, memory.why)


def engine_info(registry: Registry, engine: str) -> EngineInfo:
    """Describes an engine that can run on this machine."""
    provider = registry.providers[engine]
    availability = provider.availability()
    return EngineInfo(engine, shown_compute(availability), provider.version(), availability.dtypes)


def shown_compute(availability: Availability, exists: Callable[[str], bool] = os.path.exists) -> Compute:
    """Returns what an engine computes on: a GPU only if the engine says so and the system shows one."""
    nodes = _DEVICE_NODES.get(availability.compute)
    if availability.compute == "metal":
        return "metal" if platform.system() == "Darwin" else "cpu"
    return availability.compute if nodes is None or any(map(exists, nodes)) else "cpu"


def engines_for(registry: Registry, preference: str, wanted: str | None, architecture: str) -> tuple[str, ...]:
    """Returns the engines that run an architecture here, the first choice first; empty if none does.

    A named engine (`preference`, and `wanted` for this one model) is used wherever it can run; other engines only for
    what it cannot run. With "auto", all engines that may be chosen automatically, the best first.
    """
    looks = {name: found.availability() for name, found in registry.providers.items() if found.kind == "stage"}
    able = [name for name, look in looks.items() if look.available and registry.providers[name].supports(architecture)]
    named = [name for name in dict.fromkeys((wanted, preference)) if name in able]
    if preference in able:
        return tuple(name for name in named if name is not None)
    ranked = sorted((n for n in able if looks[n].preference >= 0), key=lambda n: (-looks[n].preference, n))
    return tuple(dict.fromkeys([*(name for name in named if name is not None), *ranked]))


def why_not(registry: Registry, engine: str, architecture: str) -> str:
    """Returns why an engine cannot run an architecture here; "" if it can."""
    try:
        provider = registry.provider(engine)
    except MeshError as exc:
        return str(exc)
    availability = provider.availability()
    if not availability.available:
        return f"engine {engine} cannot run here: {availability.reason}"
    return "" if provider.supports(architecture) else f"engine {engine} does not run {architecture} models"
