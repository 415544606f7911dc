"""The settings of a node, with the origin of each value. `table` declares their names, `loading` reads them.

A setting has one name in three spellings: flag `--api-port`, variable `EXO_MESH_API_PORT`, key `api_port`.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from exo_mesh.base.printable import printable, typed
from exo_mesh.domain.device import FULL
from exo_mesh.domain.footprint import MOST_CHUNK_TOKENS, MOST_SEQUENCES
from exo_mesh.domain.grouping import WishedBackend
from exo_mesh.errors import InputError
from exo_mesh.settings import values

PREFIX = "EXO_MESH_"
SECRET_FILE_NAME = "mesh.secret"
"""A file in the home, written by `exo-mesh join` and read if no other secret is set."""
SECRET_VARIABLE = "EXO_MESH_SECRET"
"""The secret itself. It has no flag, since `ps` shows flags to everybody, and no key: config.toml is often shared."""


class ConfigError(InputError):
    """A setting is invalid. The message begins with its source: the flag, the variable, or the file and key."""

    code = "bad_setting"


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a node. Port 0 means any free port; None means that the node works the value out.

    secret: the content of secret_file or EXO_MESH_SECRET; "" means an open mesh.
    """

    home: Path
    name: str
    role: str = FULL
    host: str = "0.0.0.0"
    api_port: int = 52415
    api: bool = True
    ollama_port: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    grpc_port: int = 5000
    probe_datagrams: bool = True
    data_ports: tuple[int, int] | None = None
    discovery: tuple[str, ...] = ("udp", "mdns")
    listen_port: int = 5678
    broadcast_port: int = 5678
    bootstrap_peers: tuple[str, ...] = ()
    peers_file: Path | None = None
    tailscale_api_key_file: Path | None = None
    tailnet: str = "-"
    tailscale_api_url: str = "https://api.tailscale.com"
    node_id_filter: tuple[str, ...] = ()
    interface_type_filter: tuple[str, ...] = ()
    namespace: str = "default"
    secret_file: Path | None = None
    secret: str = field(default="", repr=False)
    open_admin: bool = False
    open_paths: tuple[str, ...] = ("health", "metrics")
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    web_tools: bool = False
    web_tools_ports: tuple[int, ...] = ()
    web_search: str = ""
    web_search_key_file: Path | None = None
    headless: bool = False
    page_languages: tuple[str, ...] = ()
    page_languages_dir: Path | None = None
    engine: str = "auto"
    engine_options: dict[str, str] = field(default_factory=dict)
    model_engines: dict[str, str] = field(default_factory=dict)
    openai_servers: tuple[str, ...] = ()
    openai_key_file: Path | None = None
    llama_server: str = ""
    rkllm_server_host: str = ""
    rkllm_server_port: int = 0
    stands_for: dict[str, str] = field(default_factory=dict)
    server_options: dict[str, str] = field(default_factory=dict)
    measure_engines: str = "on"
    mixed_rings: str = "auto"
    tensor_group: int = 0
    group_backend: WishedBackend = "auto"
    hostfile: Path | None = None
    fast_synch: str = "auto"
    max_memory_bytes: int | None = None
    override_memory_bytes: int | None = None
    fake_mem_file: Path | None = None
    memory_threshold: float | None = None
    memory_poll_interval: float = 1.5
    spare_runners: int = 0
    models_dirs: tuple[Path, ...] = ()
    fetch: bool = True
    models_max_bytes: int | None = None
    evict_pinned: bool = False
    store: Path | None = None
    store_host: str = ""
    store_enabled: bool = True
    store_fallback: bool = True
    store_cleanup: bool = True
    store_keep_gb: int = 40

    default_model: str = ""
    default_temp: float | None = None
    system_prompt: str = ""
    max_generate_tokens: int = 4096
    preload: tuple[str, ...] = ()
    idle_unload: int = 0
    keep_agent_lines: bool = False
    control_tokens_in_text: bool = False
    keep_responses: int = 86_400
    custom_model_cards_dir: Path | None = None
    trust_remote_code: bool = False
    min_peers: int = 1
    placement: str = "memory"
    proportional_layers: str = "on"
    auto_place: bool = True
    auto_replicas: str = "on"
    context_limit: int | None = None
    max_batch_size: int = MOST_SEQUENCES
    no_batch: bool = False
    prefill_chunk: int = MOST_CHUNK_TOKENS
    prefix_cache_bytes: int = values.MOST_CACHE_BYTES
    prefix_disk: Path | None = None
    prefix_disk_max_bytes: int = 20 * 10**9
    prefix_disk_days: int = 7
    skip_warmup: bool = False
    max_queued: int = 32
    queue_timeout: int = 120
    prefill_timeout: int = 120
    token_timeout: int = 30
    response_timeout: int = 300
    stop_grace: int = 30
    allow_sleep: bool = False
    trace_sample: float = 0.01
    trace_retention_days: int = 3
    otlp_endpoint: str = ""
    otlp_headers: dict[str, str] = field(default_factory=dict, repr=False)
    otlp_protocol: str = "http/json"
    otlp_certificate: Path | None = None
    otlp_service: str = "exo-mesh"
    otlp_attributes: dict[str, str] = field(default_factory=dict)
    hang_debug: int = 0
    image_transport_debug: bool = False
    vision_debug_save_dir: Path | None = None
    power_tool: str = "auto"
    sysfs: Path = Path("/sys")
    request_log: str = "logs/requests.jsonl"
    request_log_max: int = 10_000
    wait_for_peers: int = 0
    discovery_timeout: int = 30
    offline: bool = False
    log_format: str = "console"
    log_level: str = "info"
    log_file: str = "none"
    log_file_max_bytes: int = 100_000_000
    log_files: int = 5
    log_retention_days: int = 30


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings with the origin of each value, by the name of the setting (key of SETTINGS)."""

    settings: Settings
    origins: Mapping[str, str]
    config_file: Path
    warnings: tuple[str, ...] = ()
    """For people: variables that have no effect, either unknown EXO_MESH_* ones or other programs'."""

    def was_set(self, name: str) -> bool:
        """Whether the value was set, rather than the default."""
        return self.origins[name] != "default"


def default_settings() -> Settings:
    """The settings of a node without flags, variables and config.toml."""
    name = re.sub(r"\s+", "-", printable(typed(platform.node())).split(".")[0].strip())[:64]
    return Settings(home=home_of({}), name=name or "exo-mesh")


def home_of(environ: Mapping[str, str]) -> Path:
    """The home of a node that was started without --home."""
    import platformdirs

    given = environ.get(PREFIX + "HOME")
    return values.path(given) if given else platformdirs.user_data_path("exo-mesh", appauthor=False)
