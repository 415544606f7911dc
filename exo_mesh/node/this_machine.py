"""What this machine is: its addresses, its device, and which engines can run here."""

from __future__ import annotations

import os
import platform
import socket

import psutil

from exo_mesh.discovery.choose import is_loopback
from exo_mesh.domain.device import Device
from exo_mesh.engine.registry import Registry
from exo_mesh.errors import MeshError


def addresses(host: str, port: int) -> tuple[str, ...]:
    """ "host:port" at which peers may reach a server bound to `host`: that host, or every address of this machine."""
    if host not in ("0.0.0.0", "::", "[::]"):
        return (f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}",)
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = [
        address.address
        for name, entries in sorted(psutil.net_if_addrs().items())
        for address in entries
        if name in up and address.family == socket.AF_INET and not is_loopback(address.address)
    ]
    return tuple(f"{address}:{port}" for address in dict.fromkeys(found or ["127.0.0.1"]))


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
