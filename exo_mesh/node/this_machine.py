"""What this machine is: its addresses, its device, and which engines can run here."""

from __future__ import annotations

import os
import platform

from exo_mesh.discovery.interfaces import read_interfaces
from exo_mesh.domain.addresses import advertised
from exo_mesh.domain.device import Device
from exo_mesh.engine.registry import Registry
from exo_mesh.errors import MeshError


def addresses(host: str, port: int) -> tuple[str, ...]:
    """ "host:port" at which peers may reach a server bound to `host`, best first."""
    return advertised(host, port, read_interfaces())


def device(registry: Registry, preference: str) -> Device:
    """Blocking. This machine with every engine that can run on it; `engine` is "" if none can be chosen."""
    able = sorted(name for name, provider in registry.providers.items() if provider.availability().available)
    try:
        chosen = registry.choose(preference).name
    except MeshError:
        chosen = ""
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    name = platform.processor() or platform.machine()
    return Device("gpu" if apple else "cpu", name, tuple(able), chosen, os.cpu_count() or 0)


def why_not(registry: Registry, engine: str, architecture: str) -> str:
    """Why an engine cannot run an architecture here; "" if it can."""
    try:
        provider = registry.provider(engine)
    except MeshError as exc:
        return str(exc)
    availability = provider.availability()
    if not availability.available:
        return f"engine {engine} cannot run here: {availability.reason}"
    return "" if provider.supports(architecture) else f"engine {engine} does not run {architecture} models"
