"""The settings of a node, and where each value came from: flags > EXO_MESH_* environment > config.toml > defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a node can be told. Port 0 means any free port; None means "work it out"."""

    home: Path
    name: str
    host: str = "0.0.0.0"
    api_port: int = 52415
    api: bool = True
    grpc_port: int = 5000
    data_ports: tuple[int, int] | None = None
    discovery: tuple[str, ...] = ("udp",)
    listen_port: int = 5678
    broadcast_port: int = 5678
    bootstrap_peers: tuple[str, ...] = ()
    namespace: str = "default"
    engine: str = "auto"
    engine_options: dict[str, str] = field(default_factory=dict)
    max_memory_bytes: int | None = None
    models_dirs: tuple[Path, ...] = ()
    min_peers: int = 1
    placement: str = "memory"
    context_limit: int | None = None
    max_queued: int = 32
    log_format: str = "console"
    log_level: str = "info"
