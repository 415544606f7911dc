"""The settings of a node, with the origin of each value.

Flags > EXO_MESH_* environment > aliases of older programs > config.toml > defaults.
A setting has one name in three spellings: flag `--api-port`, variable `EXO_MESH_API_PORT`, key `api_port`.
"""

from __future__ import annotations

import difflib
import json
import os
import platform
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exo_mesh.domain.addresses import LINK_WORDS
from exo_mesh.domain.device import FULL, ROLES
from exo_mesh.domain.footprint import LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS, MOST_SEQUENCES
from exo_mesh.domain.grouping import WishedBackend
from exo_mesh.errors import InputError
from exo_mesh.printable import quoted
from exo_mesh.security.secret import parse_secret, read_secret_file
from exo_mesh.settings import values as values
from exo_mesh.settings.aliases import alias_texts
from exo_mesh.settings.foreign import KEYS, foreign_variables
from exo_mesh.settings.store_table import store_keys

PREFIX = "EXO_MESH_"
SECRET_FILE_NAME = "mesh.secret"
"""A file in the home, written by `exo-mesh join` and read if no other secret is set."""
SECRET_VARIABLE = "EXO_MESH_SECRET"
"""The secret itself. It has no flag, since `ps` shows flags to everybody, and no key: config.toml is often shared."""
CLIENT_VARIABLES = frozenset({"EXO_MESH_API_URL", "EXO_MESH_API_KEY", "EXO_MESH_API_CA"})
"""Variables that verbs which call a node read, and that the node itself ignores."""
SECRET_MAPPINGS = frozenset({"otlp_header"})
"""Settings whose values are secret: only their keys are shown."""
_OTHER_VARIABLES = CLIENT_VARIABLES | {SECRET_VARIABLE}


RETIRED = {"no_loopback_exemption": "being on this machine gives no rights any more; leave it out"}
"""By retired setting: what to do instead."""


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
    """For people: variables that have no effect, either unknown EXO_MESH_* ones or those of other programs."""

    def was_set(self, name: str) -> bool:
        """Whether the value was set, rather than the default."""
        return self.origins[name] != "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """Declares one setting: its names, its help, and how its texts are parsed.

    parse: turns the text of one item into its value; its ValueError says what is needed. field: the name in Settings,
    if it differs. toml: types that config.toml may use for an item. separator: set if several items are allowed; it
    separates them in a variable, and the flag may be repeated. show: turns a value into its text. alias: a second flag
    for the same setting. bare: the text that the flag without a value stands for, if that is allowed.
    """

    name: str
    metavar: str
    help: str
    parse: Callable[[str], Any]
    field: str = ""
    toml: tuple[type, ...] = (str,)
    separator: str = ""
    show: Callable[[Any], str] = str
    alias: str = ""
    bare: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def words(self) -> tuple[str, ...]:
        """The allowed words of a setting that is a choice of words; else ()."""
        return self.parse.choices if isinstance(self.parse, values.OneOf | values.SomeOf) else ()

    @property
    def is_switch(self) -> bool:
        return self.toml == (bool,)

    @property
    def is_mapping(self) -> bool:
        return self.parse is values.option

    def value(self, settings: Settings) -> Any:
        """The value in force."""
        return getattr(settings, self.field or self.name)

    def text(self, settings: Settings) -> str:
        """The value in force as a variable would have it; empty if there is none."""
        value = self.value(settings)
        if isinstance(value, dict):
            value = [f"{key}={item}" for key, item in value.items()]
        if self.separator:
            return self.separator.join(map(str, value))
        return "" if value is None else self.show(value)

    def from_texts(self, texts: Iterable[str]) -> Any:
        """Parses the texts of a flag or variable. Raises ValueError."""
        if not self.separator:
            return self.parse(list(texts)[-1])
        return self._several(item.strip() for text in texts for item in text.split(self.separator))

    def from_toml(self, raw: Any) -> Any:
        """Parses the value in config.toml. Raises ValueError."""
        if self.is_mapping and isinstance(raw, dict):
            return self._several(f"{key}={item}" for key, item in raw.items())
        if self.separator and isinstance(raw, list):
            return self._several(self._scalar(item) for item in raw)
        return self.from_texts([self._scalar(raw)])

    def _scalar(self, raw: Any) -> str:
        if type(raw) not in self.toml:
            raise ValueError(f"a value like {self.metavar or 'true'} is needed, not a TOML {type(raw).__name__}")
        return str(raw).lower() if isinstance(raw, bool) else str(raw)

    def _several(self, items: Iterable[str]) -> Any:
        parsed = [self.parse(item) for item in items if item]
        return dict(parsed) if self.is_mapping else tuple(value for value in parsed if value is not None)


_PORT = values.whole(0, 65535)
_NAME = values.matching(r"[^\s\x00-\x1f](?:[^\x00-\x1f]{0,62}[^\s\x00-\x1f])?", "1-64 characters")
_WORD = values.matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a word of letters, digits, ., _ and -")

_NODE = (
    Setting("home", "DIR", "directory of the node id, models and caches; if set, also of config.toml", values.path),
    Setting("name", "NAME", "name of this node for people; the host name by default", _NAME),
    Setting("role", "ROLE", "what this node does: full; api = serve requests, hold no layers; edge = hold layers only "
            "of models that the other peers cannot hold", values.one_of(*ROLES)),
    Setting("stop_grace", "SECONDS", "how long a stopping node lets its streams finish; a second signal ends them",
            values.whole(0, 86400), toml=(int,)),
    Setting("allow_sleep", "", "let this machine sleep while requests run", values.switched_on,
            toml=(bool,), show=lambda on: str(on).lower()),
    Setting("power_tool", "WHAT", "program that reads power and temperature: auto = mactop or macmon if installed "
            "on a Mac, off, or the path of one",
            values.matching(r"auto|off|/\S.*", "auto, off or the path of a program")),
    Setting("sysfs", "DIR", "path of this machine's /sys; some containers have it elsewhere", values.path),
)  # fmt: skip

_NETWORK = (
    Setting("host", "ADDRESS", "address to listen on", values.matching(r"\S+", "an address or host name"),
            alias="--node-host"),
    Setting("api_port", "PORT", "port of the HTTP API; 0 = any free port", _PORT, toml=(int,), alias="--port"),
    Setting("ollama_port", "PORT", "a second port of the HTTP API, at which clients of Ollama look for it; 11434 if no "
            "number is given; off by default", _PORT, toml=(int,), bare="11434"),
    Setting("no_api", "", "do not serve the HTTP API", values.switched_off, "api", (bool,),
            show=lambda on: str(not on).lower()),
    Setting("headless", "", "serve the API without the web page; GET / then answers 404",
            values.switched_on, toml=(bool,), show=lambda on: str(on).lower()),
    Setting("page_languages", "TAG", "languages of the web page besides English; by default all that there are",
            values.matching(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8}){0,3}", "a language tag such as de or pt-BR"),
            separator=","),
    Setting("page_languages_dir", "DIR", "a directory with more languages of the web page, one file TAG.json each",
            values.path),
    Setting("grpc_port", "PORT", "port on which peers reach this node (gRPC); if taken, the next free one", _PORT,
            toml=(int,), alias="--node-port"),
    Setting("data_ports", "A-B", "ports for the data streams between runners; any free ones by default",
            values.port_range, show=lambda ports: f"{ports[0]}-{ports[1]}"),
    Setting("discovery", "WAY", "how peers are found: udp, mdns, manual, tailscale, none",
            values.some_of("udp", "mdns", "manual", "tailscale", "none"), separator=","),
    Setting("listen_port", "PORT", "UDP port on which this node listens for announcements", _PORT, toml=(int,)),
    Setting("broadcast_port", "PORT", "UDP port to which this node sends announcements", _PORT, toml=(int,)),
    Setting("bootstrap_peers", "HOST:PORT", "peers to connect to, besides those that discovery finds",
            values.endpoint, separator=","),
    Setting("peers_file", "FILE", "peers to connect to: JSON, a hostfile or lines of host:port; re-read on change",
            values.path, alias="--discovery-config-path"),
    Setting("tailscale_api_key_file", "FILE", "file with a Tailscale API key, for --discovery tailscale",
            values.path),
    Setting("tailnet", "NAME", "the tailnet whose devices are listed; - = the tailnet of the API key",
            values.matching(r"[A-Za-z0-9@._-]{1,253}", "the name of a tailnet"), alias="--tailnet-name"),
    Setting("tailscale_api_url", "URL", "base URL of the Tailscale API",
            values.matching(r"https?://[^\s/]+\S*", "a URL such as https://api.tailscale.com")),
    Setting("node_id_filter", "PEER", "admit only this peer; its name or id (8 characters suffice); all by default",
            _NAME, separator=","),
    Setting("interface_type_filter", "TYPE", "connect to peers only over these kinds of links: thunderbolt, "
            "ethernet, wifi, bridge, vpn, loopback, other; all by default",
            values.one_of(*LINK_WORDS), separator=","),
    Setting("namespace", "NAME", "name of the mesh; a node ignores peers of other namespaces", _WORD),
    Setting("wait_for_peers", "N", "report not ready (/readyz, /health) until N other peers were seen",
            values.whole(0, 1024), toml=(int,)),
    Setting("discovery_timeout", "SECONDS", "how long --wait-for-peers waits; then ready without them; 0 = forever",
            values.whole(0, 86400), toml=(int,)),
    Setting("offline", "", "download from peers only; the engines run offline, too", values.switched_on,
            toml=(bool,), show=lambda on: str(on).lower()),
)  # fmt: skip

_SECURITY = (
    Setting("secret_file", "FILE", "file with the mesh secret: only peers with the same secret can join",
            values.path),
    Setting("tls_cert", "FILE", "serve the HTTP API over HTTPS with this certificate (PEM); re-read on change",
            values.path),
    Setting("tls_key", "FILE", "the private key of --tls-cert (PEM, without a passphrase)", values.path),
    Setting("open_admin", "", "on an open mesh, let everybody place, delete and drain, not only read and chat",
            values.switched_on, toml=(bool,), show=lambda on: str(on).lower()),
    Setting("open_paths", "WHAT", "what a closed mesh answers without a key: health, metrics, none",
            values.some_of("health", "metrics", "none"), separator=","),
    Setting("cors_origin", "ORIGIN", "let web pages of this origin call the HTTP API, like those of localhost",
            values.origin, "cors_origins", separator=","),
    Setting("allowed_hosts", "NAME", "a host name that clients may use for this API, or *; local names always work",
            values.host_name, separator=","),
    Setting("web_tools", "", "let callers with a key fetch public web pages through this node (/v1/tools)",
            values.switched_on, toml=(bool,), show=lambda on: str(on).lower()),
    Setting("web_tools_port", "PORT", "a port that the web tools may call besides 80 and 443", values.whole(1, 65535),
            "web_tools_ports", (int,), separator=","),
    Setting("web_search", "SERVICE", "search service of the web tools: brave, tavily, or the URL of a SearXNG",
            values.matching(r"brave|tavily|https?://[^\s/@,]+(/[^\s@,]*)?",
                            "brave, tavily or a URL such as http://127.0.0.1:8080")),
    Setting("web_search_key_file", "FILE", "file with the API key of the search service", values.path),
    Setting("trust_remote_code", "",
            "download a model's own code if the model's card allows it too; no engine of this version runs it",
            values.switched_on, toml=(bool,), show=lambda on: str(on).lower()),
)  # fmt: skip

_ENGINES = (
    Setting("engine", "NAME", "engine of this machine: auto, or the name of an installed engine", _WORD),
    Setting("engine_option", "K=V", "an option of the engine", values.option, "engine_options", separator=","),
    Setting("model_engine", "MODEL=ENGINE", "use this engine for one model on this machine",
            values.option, "model_engines", separator=","),
    Setting("measure_engines", "WHEN", "measure in quiet moments how fast each engine runs a model, for --engine auto, "
            "placement and previews: on or off",
            values.one_of("on", "off")),
    Setting("mixed_rings", "WHEN", "allow different engines in one ring: auto = only if no single "
            "engine can run the model; never",
            values.one_of("auto", "never")),
    Setting("tensor_group", "N", "how many peers form one stage (a tensor group): auto, never, or 2 to 8",
            values.group_size, toml=(str, int), show=values.group_size_text),
    Setting("group_backend", "NAME", "how the peers of a tensor group communicate: auto = RDMA if "
            "available; ring = TCP; jaccl, jaccl-ring = RDMA",
            values.one_of("auto", "ring", "jaccl", "jaccl-ring")),
    Setting("hostfile", "FILE", "a hostfile of mlx.launch: its hosts form one tensor group, in rank order",
            values.path),
    Setting("openai_server", "URL", "a model server with the OpenAI API, such as llama-server, vLLM or Ollama, whose "
            "models this node offers to the mesh; prompts and answers go there as text",
            values.matching(r"https?://[^\s/@,]+(/[^\s@,]*)?", "a URL such as http://127.0.0.1:8000"), "openai_servers",
            separator=","),
    Setting("openai_key_file", "FILE", "file with the API key of the servers of --openai-server", values.path),
    Setting("llama_server", "FILE", "the program llama-server; this node starts it for GGUF files in --models-dir",
            values.matching(r"\S.*", "a program such as llama-server, or its path")),
    Setting("rkllm_server_host", "ADDRESS", "address of a RKLLAMA server; by default one on an RK3588 or RK3576 board",
            values.matching(r"\S+", "an address or host name")),
    Setting("rkllm_server_port", "PORT", "port of the RKLLAMA server; 0 = 8080", _PORT, toml=(int,)),
    Setting("stands_for", "SERVED=MODEL", "a served model is the same model as another one in the mesh, so that each "
            "can answer for the other", values.option, separator=","),
    Setting("server_option", "ENGINE.K=V", "an option of an engine for model servers", values.option,
            "server_options", separator=","),
    Setting("fast_synch", "WHEN", "MLX_METAL_FAST_SYNCH for the engines: auto, on or off",
            values.one_of("auto", "on", "off"), bare="on"),
)  # fmt: skip

_MEMORY = (
    Setting("max_memory", "SIZE", "most memory that models may use on this machine, such as 12GB; 0 = hold no layers",
            values.size_or_zero, "max_memory_bytes", (str, int)),
    Setting("memory_threshold", "SHARE", "share of memory in use that is critical; by default free memory decides",
            values.share, toml=(int, float)),
    Setting("memory_poll_interval", "SECONDS", "time between readings of the memory", values.seconds(0.1, 60.0),
            toml=(int, float)),
    Setting("spare_runners", "N", "idle runners that have imported the engine already, for a faster recovery",
            values.whole(0, 8), toml=(int,)),
)  # fmt: skip

_MODELS = (
    Setting("models_dir", "DIR", "a directory that contains model directories, or one model directory",
            values.path, "models_dirs", separator=os.pathsep),
    Setting("custom_model_cards_dir", "DIR", "a directory with model cards, in addition to `cards` in the home",
            values.path),
    Setting("no_fetch", "", "download no model files to this machine, neither from the hub nor from peers",
            values.switched_off, "fetch", (bool,), show=lambda on: str(not on).lower()),
    Setting("models_max_size", "SIZE", "most disk space for downloaded models; beyond it, unused ones are deleted",
            values.size, "models_max_bytes", (str, int)),
    Setting("evict_pinned", "", "when making room, also delete models that were pulled by name", values.switched_on,
            toml=(bool,), show=lambda on: str(on).lower()),
    Setting("store", "DIR", "host the mesh's model store in this directory", values.path),
    Setting("store_host", "PEER", "name or id of the peer that hosts the store; by default any peer with one",
            _NAME),
    Setting("no_store", "", "neither use nor host a model store", values.switched_off, "store_enabled", (bool,),
            show=lambda on: str(not on).lower()),
    Setting("no_store_fallback", "", "do not download from the hub what the store does not have",
            values.switched_off, "store_fallback", (bool,), show=lambda on: str(not on).lower()),
    Setting("no_store_cleanup", "", "keep this node's copies of the store's models when nothing uses them",
            values.switched_off, "store_cleanup", (bool,), show=lambda on: str(not on).lower()),
    Setting("store_keep_gb", "N", "GiB of unused copies of the store's models to keep, the newest first; 0 = none",
            values.whole(0, 1_000_000), toml=(int,)),
    Setting("default_model", "NAME", "model for requests that name none; by default the only model there is",
            values.matching(r"\S.{0,4095}", "the name of a model")),
    Setting("default_temp", "T", "temperature for requests that set none; by default what the model recommends",
            values.number(0.0, 2.0), toml=(int, float)),
    Setting("system_prompt", "TEXT", "system prompt for conversations that have none",
            values.matching(r"(?s:.{1,65536})", "a text")),
    Setting("keep_agent_lines", "", "leave agents' billing and date lines at the start of prompts (not cacheable)",
            values.switched_on, toml=(bool,), show=lambda on: str(on).lower()),
    Setting("keep_responses", "SECONDS", "keep answers of /v1/responses this long after their last use; 0 = never",
            values.whole(0, 10**8), toml=(int,)),
    Setting("preload", "MODEL", "load this model when the node starts, as soon as the mesh can hold it",
            values.matching(r"\S.{0,4095}", "the name of a model"), separator=","),
    Setting("idle_unload", "SECONDS", "unload models that this node placed after this long without use; 0 = never",
            values.whole(0, 10**8), toml=(int,)),
    Setting("min_peers", "N", "spread each model over at least N peers", values.whole(1, 1024), toml=(int,)),
    Setting("placement", "POLICY", "policy for how many peers a model gets: memory, latency or throughput",
            values.one_of("memory", "latency", "throughput")),
    Setting("proportional_layers", "WHEN", "on = divide layers by memory or speed; off = as evenly as memory allows",
            values.one_of("on", "off"), bare="on"),
    Setting("no_auto_place", "", "refuse requests for models without an instance; only POST /instance places models",
            values.switched_off, "auto_place", (bool,), show=lambda on: str(not on).lower()),
    Setting("auto_replicas", "WHEN", "on = place a further instance of a small model while its requests queue; off = "
            "only what requests and people ask for", values.one_of("on", "off"), bare="on"),
)  # fmt: skip

_LIMITS = (
    Setting("context_limit", "N", "most tokens of prompt + output; the model's own limit by default",
            values.whole(1, 10**9), toml=(int,)),
    Setting("max_generate_tokens", "N", "most output tokens of a chat that sets no limit, if the context has room",
            values.whole(1, 10**9), toml=(int,), alias="--max-output-tokens"),
    Setting("max_batch_size", "N", "requests that run at once on a ring whose last layers this node holds",
            values.whole(1, MOST_SEQUENCES), toml=(int,)),
    Setting("no_batch", "", "the same as --max-batch-size 1: requests of a model run strictly one after the other",
            values.switched_on, toml=(bool,), show=lambda on: str(on).lower()),
    Setting("prefill_chunk", "N", "most prompt tokens in one step of such a ring; fewer if these would delay streams",
            values.whole(LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS), toml=(int,)),
    Setting("prefix_cache", "SIZE", "most KV of ended requests that each stage here keeps for later prompts, such as "
            "4GB; auto = what running requests leave of the KV pool; off", values.cache_size, "prefix_cache_bytes",
            (str, int), show=values.cache_size_text),
    Setting("max_queued", "N", "requests that may wait per model; further ones get a 429",
            values.whole(1, 100_000), toml=(int,)),
    Setting("queue_timeout", "SECONDS", "longest wait of a request in the queue; then it gets a 429",
            values.whole(1, 10**6), toml=(int,)),
    Setting("prefill_timeout", "SECONDS", "longest silence of a ring before the first token",
            values.whole(1, 10**6), toml=(int,)),
    Setting("token_timeout", "SECONDS", "longest silence of a ring between two tokens",
            values.whole(1, 10**6), toml=(int,)),
    Setting("response_timeout", "SECONDS", "longest duration of a request; then it ends with the output so far",
            values.whole(1, 10**6), toml=(int,)),
)  # fmt: skip

_LOGGING = (
    Setting("log_format", "FORMAT", "console = text on stderr, json = JSON lines on stdout, both",
            values.one_of("console", "json", "both")),
    Setting("log_level", "LEVEL", "lowest level that is logged: debug, info, warning or error",
            values.one_of("debug", "info", "warning", "error")),
    Setting("log_file", "FILE", "also write the log to this file below the home, as JSON lines; or none",
            values.matching(r"\S.*", "a file, or none")),
    Setting("log_file_max_size", "SIZE", "largest log file; then it becomes FILE.1 and a new one begins",
            values.size, "log_file_max_bytes", (str, int)),
    Setting("log_files", "N", "how many older log files are kept, FILE.1 to FILE.N", values.whole(0, 1000),
            toml=(int,)),
    Setting("log_retention_days", "DAYS", "delete log files older than this and begin one each day; 0 = no limit",
            values.whole(0, 36_500), toml=(int,)),
    Setting("request_log", "FILE", "file below the home for one JSON line per request, without its text; or none",
            values.matching(r"\S.*", "a file, or none")),
    Setting("request_log_max", "N", "how many recent requests are kept in memory, for /requests/recent",
            values.whole(1, 1_000_000), toml=(int,)),
    Setting("trace_sample", "SHARE", "share of requests that are traced, for GET /v1/traces",
            values.share, toml=(int, float)),
    Setting("trace_retention_days", "DAYS", "how long traces are kept; 0 = until newer ones need the space",
            values.whole(0, 36_500), toml=(int,)),
    Setting("otlp_endpoint", "URL", "OpenTelemetry collector for the traces, such as http://host:4318, or none",
            values.collector),
    Setting("otlp_header", "K=V", "a header for the collector, such as a key; `ps` shows flags to every user",
            values.option, "otlp_headers", separator=","),
    Setting("otlp_protocol", "NAME", "http/json, or http/protobuf (needs exo-mesh[otel])",
            values.one_of("http/json", "http/protobuf")),
    Setting("otlp_certificate", "FILE", "CA (PEM) that signed the collector's certificate; the system's by default",
            values.path),
    Setting("otlp_service", "NAME", "service.name of the exported traces", _NAME),
    Setting("otlp_attribute", "K=V", "a resource attribute to add to the exported traces", values.option,
            "otlp_attributes", separator=","),
    Setting("hang_debug", "SECONDS", "log the stacks of a runner without progress at this interval; 0 = never",
            values.whole(0, 86400), toml=(int,)),
    Setting("image_transport_debug", "", "log a line for each image of a request: its size, pixels and checksum",
            values.switched_on, toml=(bool,), show=lambda on: str(on).lower()),
    Setting("vision_debug_save_dir", "DIR", "write the last 200 images to this directory, as models get them (PPM)",
            values.path),
)  # fmt: skip

_TESTS = (
    Setting("override_memory", "SIZE", "for tests: act as if this machine had this much memory",
            values.size, "override_memory_bytes", (str, int)),
    Setting("fake_mem_file", "FILE", "for tests: read total and available memory from this file each time",
            values.path),
)  # fmt: skip

GROUPS: Mapping[str, tuple[Setting, ...]] = {
    "node": _NODE,
    "network": _NETWORK,
    "security": _SECURITY,
    "engines": _ENGINES,
    "memory": _MEMORY,
    "models": _MODELS,
    "limits": _LIMITS,
    "logging": _LOGGING,
    "tests": _TESTS,
}
"""The settings by subject, in the order in which `exo-mesh serve --help` and docs show them."""

SETTINGS: Mapping[str, Setting] = {setting.name: setting for group in GROUPS.values() for setting in group}
"""Every setting by name, in the same order."""

_VARIABLES = frozenset(setting.variable for setting in SETTINGS.values())
"""The variable of every setting."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known word, or "" if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def default_settings() -> Settings:
    """The settings of a node without flags, variables and config.toml."""
    name = re.sub(r"\s+", "-", platform.node().split(".")[0].strip())[:64]
    return Settings(home=home_of({}), name=name or "exo-mesh")


def home_of(environ: Mapping[str, str]) -> Path:
    """The home of a node that was started without --home."""
    import platformdirs

    given = environ.get(PREFIX + "HOME")
    return values.path(given) if given else platformdirs.user_data_path("exo-mesh", appauthor=False)


def load_settings(flags: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> LoadedSettings:
    """Merges flags, variables, aliases and config.toml. flags: by name of a setting, its texts in order.

    An empty variable counts as unset. Raises ConfigError that names the source of the first value that cannot be used.
    """
    import platformdirs

    given: dict[str, tuple[Any, str]] = {}
    texts, aliases = _environment(environ), alias_texts(environ)
    for name, setting in SETTINGS.items():
        if name in flags:
            source = setting.flag
            given[name] = _read(f"{source} {flags[name][-1]}", setting.from_texts, flags[name]), f"flag {source}"
        elif name in texts:
            source = setting.variable
            given[name] = _read(f"{source}={texts[name]}", setting.from_texts, [texts[name]]), f"environment {source}"
        elif name in aliases:
            source, text = aliases[name]
            given[name] = _read(f"{source}={environ[source]}", setting.from_texts, [text]), f"environment {source}"
    config_dir = given["home"][0] if "home" in given else platformdirs.user_config_path("exo-mesh", appauthor=False)
    config_file = config_dir / "config.toml"
    for name, raw in _file(config_file).items():
        if name not in given:
            shown = json.dumps(raw, default=str, ensure_ascii=False)
            value = _read(f"{config_file}: {name} = {shown}", SETTINGS[name].from_toml, raw)
            given[name] = value, f"{config_file}:{name}"
    return replace(
        _join(given, environ, config_file),
        warnings=(*_unknown_variables(environ), *foreign_variables(environ, _VARIABLES)),
    )


def _secret(given: Mapping[str, tuple[Any, str]], environ: Mapping[str, str], home: Path) -> tuple[str, Path | None]:
    """(secret in force, its file or None). --secret-file wins over EXO_MESH_SECRET and EXO_MESH_SECRET_FILE; then come
    config.toml and the file that `exo-mesh join` wrote into the home."""
    path, origin = given.get("secret_file", (None, ""))
    text = environ.get(SECRET_VARIABLE)
    if text and origin.startswith("environment"):
        raise ConfigError(f"{SECRET_VARIABLE} and {SETTINGS['secret_file'].variable} are both set: unset one")
    if text and not origin.startswith("flag"):
        return str(_read(SECRET_VARIABLE, parse_secret, text)), path
    if path is None and (home / SECRET_FILE_NAME).exists():
        path, origin = home / SECRET_FILE_NAME, SECRET_FILE_NAME
    return ("" if path is None else str(_read(f"{origin.split()[-1]} {path}", read_secret_file, path))), path


def _join(given: Mapping[str, tuple[Any, str]], environ: Mapping[str, str], config_file: Path) -> LoadedSettings:
    fields = {SETTINGS[name].field or name: value for name, (value, _) in given.items()}
    settings = replace(default_settings(), **fields)
    secret, secret_file = _secret(given, environ, settings.home)
    settings = replace(settings, secret=secret, secret_file=secret_file)
    if settings.ollama_port and settings.ollama_port in (settings.api_port, settings.grpc_port):
        other = "--api-port" if settings.ollama_port == settings.api_port else "--grpc-port"
        message = f"{other} and --ollama-port are both {settings.ollama_port}; every API port serves clients of Ollama"
        raise ConfigError(message, param="ollama_port")
    if settings.api and settings.api_port and settings.api_port == settings.grpc_port:
        raise ConfigError(f"--api-port and --grpc-port are both {settings.api_port}", param="api_port")
    if settings.no_batch and given.get("max_batch_size", (1, ""))[0] != 1:
        raise ConfigError(
            f"--no-batch runs one request at a time, but --max-batch-size is {settings.max_batch_size}: leave one out",
            param="max_batch_size",
        )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        alone, other = ("cert", "key") if settings.tls_key is None else ("key", "cert")
        raise ConfigError(f"--tls-{alone} needs --tls-{other}", param=f"tls_{other}")
    origins = {name: given[name][1] if name in given else "default" for name in SETTINGS}
    return LoadedSettings(settings, origins, config_file)


def _read(source: str, parse: Callable[[Any], Any], raw: Any) -> Any:
    try:
        return parse(raw)
    except ValueError as exc:
        raise ConfigError(f"{source}: {exc}") from exc


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The texts of the EXO_MESH_* variables, by setting."""
    known = {setting.variable: name for name, setting in SETTINGS.items()}
    return {name: environ[variable] for variable, name in known.items() if environ.get(variable)}


def _unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A warning for each EXO_MESH_* variable that is not a setting."""
    ours = sorted(name for name in environ if name.startswith(PREFIX) and name not in {*_VARIABLES, *_OTHER_VARIABLES})
    return tuple(f"{name} is set, but there is no such setting{did_you_mean(name, _VARIABLES)}" for name in ours)


def _file(path: Path) -> dict[str, Any]:
    """Reads the keys of config.toml; empty if there is none. Raises ConfigError."""
    try:
        keys = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: not valid TOML: {exc}") from exc
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    table = keys.pop("model_store", {})
    try:
        stored = store_keys(table)
    except ValueError as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    if twice := sorted(keys.keys() & stored.keys()):
        raise ConfigError(f"{path}: {', '.join(twice)} and the table [model_store] set the same thing: leave one out")
    keys |= stored
    for key in keys:
        if key == "home":
            raise ConfigError(f"{path}: home cannot be set in here; use --home or {PREFIX}HOME")
        if key not in SETTINGS:
            known = {**KEYS, **RETIRED}
            hint = f": {known[key]}" if key in known else did_you_mean(key, SETTINGS)
            raise ConfigError(f"{path}: no setting {quoted(key)}{hint}")
    return keys
