"""The settings of a node, each declared by a field of Settings. `table` lists them, `loading` reads their values.

A setting has one name in three spellings: flag `--api-port`, variable `EXO_MESH_API_PORT`, key `api_port`.
"""

# No `from __future__ import annotations`: the annotations of Settings are read as objects.

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from exo_mesh.base.printable import printable, typed
from exo_mesh.domain.addresses import LINK_WORDS
from exo_mesh.domain.device import FULL, ROLES
from exo_mesh.domain.footprint import LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS, MOST_SEQUENCES
from exo_mesh.domain.grouping import WishedBackend
from exo_mesh.errors import InputError
from exo_mesh.settings import values
from exo_mesh.settings.setting import PREFIX, SettingGroup

SECRET_FILE_NAME = "mesh.secret"
"""A file in the home, written by `exo-mesh join` and read if no other secret is set."""
SECRET_VARIABLE = "EXO_MESH_SECRET"
"""The secret itself. It has no flag, since `ps` shows flags to everybody, and no key: config.toml is often shared."""


class ConfigError(InputError):
    """A setting is invalid. The message begins with its source: the flag, the variable, or the file and key."""

    code = "bad_setting"


NODE, NETWORK, SECURITY = SettingGroup("node"), SettingGroup("network"), SettingGroup("security")
ENGINES, MEMORY, MODELS = SettingGroup("engines"), SettingGroup("memory"), SettingGroup("models")
LIMITS, LOGGING, TESTS = SettingGroup("limits"), SettingGroup("logging"), SettingGroup("tests")

_NAME = values.matching(r"[^\s\x00-\x1f](?:[^\x00-\x1f]{0,62}[^\s\x00-\x1f])?", "1-64 characters")
_WORD = values.matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a word of letters, digits, ., _ and -")


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a node. Port 0 means any free port; None means that the node works the value out.

    A field is the only place that declares a setting: type, kind of value with its bounds, help, default. Flag,
    variable, key of config.toml, help, docs and tests follow from it; help shows the settings in the order of the
    fields.

    secret: the content of secret_file or EXO_MESH_SECRET; "" means an open mesh. It is no setting.
    """

    # fmt: off
    home: Annotated[Path, NODE.path("DIR", default_words="the XDG data directory"),
        "directory of the node id, models and caches; if set, also of config.toml"]
    name: Annotated[str, NODE.text("NAME", _NAME, default_words="the host name"),
        "name of this node for people; the host name by default"]
    role: Annotated[str, NODE.one_of("ROLE", *ROLES),
        "what this node does: full; api = serve requests, hold no layers; edge = hold layers only of models that the "
        "other peers cannot hold"] = FULL
    stop_grace: Annotated[int, NODE.whole("SECONDS", 0, 86400),
        "how long a stopping node lets its streams finish; a second signal ends them"] = 30
    allow_sleep: Annotated[bool, NODE.switch(), "let this machine sleep while requests run"] = False
    power_tool: Annotated[str, NODE.matching("WHAT", r"auto|off|/\S.*", "auto, off or the path of a program",
        private=True),
        "program that reads power and temperature: auto = mactop or macmon if installed on a Mac, off, or the path of "
        "one"] = "auto"
    sysfs: Annotated[Path, NODE.path("DIR"),
        "path of this machine's /sys; some containers have it elsewhere"] = Path("/sys")

    host: Annotated[str, NETWORK.matching("ADDRESS", r"\S+", "an address or host name", alias="--node-host"),
        "address to listen on"] = "0.0.0.0"
    api_port: Annotated[int, NETWORK.port(alias="--port"), "port of the HTTP API; 0 = any free port"] = 52415
    ollama_port: Annotated[int | None, NETWORK.port(bare="11434"),
        "a second port of the HTTP API, at which clients of Ollama look for it; 11434 if no number is given; off by "
        "default"] = None
    api: Annotated[bool, NETWORK.off_switch(), "do not serve the HTTP API"] = True
    headless: Annotated[bool, NETWORK.switch(), "serve the API without the web page; GET / then answers 404"] = False
    page_languages: Annotated[tuple[str, ...], NETWORK.matching("TAG",
        r"[a-z]{2,3}(-[A-Za-z0-9]{2,8}){0,3}", "a language tag such as de or pt-BR"),
        "languages of the web page besides English; by default all that there are"] = ()
    page_languages_dir: Annotated[Path | None, NETWORK.path("DIR"),
        "a directory with more languages of the web page, one file TAG.json each"] = None
    grpc_port: Annotated[int, NETWORK.port(alias="--node-port"),
        "port on which peers reach this node (gRPC); if taken, the next free one"] = 5000
    probe_datagrams: Annotated[bool, NETWORK.off_switch(),
        "probe idle peers by gRPC only, never by UDP datagrams; costs some CPU"] = True
    data_ports: Annotated[tuple[int, int] | None, NETWORK.text("A-B", values.port_range, show=values.port_range_text),
        "ports for the data streams between runners; any free ones by default"] = None
    discovery: Annotated[tuple[str, ...], NETWORK.some_of("WAY", "udp", "mdns", "manual", "tailscale", "none"),
        "how peers are found: udp, mdns, manual, tailscale, none"] = ("udp", "mdns")
    listen_port: Annotated[int, NETWORK.port(), "UDP port on which this node listens for announcements"] = 5678
    broadcast_port: Annotated[int, NETWORK.port(), "UDP port to which this node sends announcements"] = 5678
    bootstrap_peers: Annotated[tuple[str, ...], NETWORK.text("HOST:PORT", values.endpoint, private=True),
        "peers to connect to, besides those that discovery finds"] = ()
    peers_file: Annotated[Path | None, NETWORK.path("FILE", alias="--discovery-config-path"),
        "peers to connect to: JSON, a hostfile or lines of host:port; re-read on change"] = None
    tailscale_api_key_file: Annotated[Path | None, NETWORK.path("FILE"),
        "file with a Tailscale API key, for --discovery tailscale"] = None
    tailnet: Annotated[str, NETWORK.matching("NAME", r"[A-Za-z0-9@._-]{1,253}", "the name of a tailnet",
        alias="--tailnet-name", private=True),
        "the tailnet whose devices are listed; - = the tailnet of the API key"] = "-"
    tailscale_api_url: Annotated[str, NETWORK.matching("URL",
        r"https?://[^\s/]+\S*", "a URL such as https://api.tailscale.com", private=True),
        "base URL of the Tailscale API"] = "https://api.tailscale.com"
    node_id_filter: Annotated[tuple[str, ...], NETWORK.text("PEER", _NAME),
        "admit only this peer; its name or id (4 digits suffice); all by default"] = ()
    interface_type_filter: Annotated[tuple[str, ...], NETWORK.one_of("TYPE", *LINK_WORDS),
        "connect to peers only over these kinds of links: thunderbolt, ethernet, wifi, bridge, vpn, loopback, other; "
        "all by default"] = ()
    namespace: Annotated[str, NETWORK.text("NAME", _WORD),
        "name of the mesh; a node ignores peers of other namespaces"] = "default"
    wait_for_peers: Annotated[int, NETWORK.whole("N", 0, 1024),
        "report not ready (/readyz, /health) until N other peers were seen"] = 0
    discovery_timeout: Annotated[int, NETWORK.whole("SECONDS", 0, 86400),
        "how long --wait-for-peers waits; then ready without them; 0 = forever"] = 30
    offline: Annotated[bool, NETWORK.switch(), "download from peers only; the engines run offline, too"] = False

    secret: str = field(default="", repr=False)
    secret_file: Annotated[Path | None, SECURITY.path("FILE",
        default_words="`mesh.secret` in the home, if there is one"),
        "file with the mesh secret: only peers with the same secret can join"] = None
    tls_cert: Annotated[Path | None, SECURITY.path("FILE"),
        "serve the HTTP API over HTTPS with this certificate (PEM); re-read on change"] = None
    tls_key: Annotated[Path | None, SECURITY.path("FILE"),
        "the private key of --tls-cert (PEM, without a passphrase)"] = None
    open_admin: Annotated[bool, SECURITY.switch(),
        "on an open mesh, let everybody place, delete, drain and stop, over the API and from peers, not only read and "
        "chat"] = False
    open_paths: Annotated[tuple[str, ...], SECURITY.some_of("WHAT", "health", "metrics", "none"),
        "what a closed mesh answers without a key: health, metrics, none"] = ("health", "metrics")
    cors_origins: Annotated[tuple[str, ...], SECURITY.text("ORIGIN", values.origin, name="cors_origin"),
        "let web pages of this origin call the HTTP API, like those of localhost"] = ()
    allowed_hosts: Annotated[tuple[str, ...], SECURITY.text("NAME", values.host_name),
        "a host name that clients may use for this API, or *; local names always work"] = ()
    web_tools: Annotated[bool, SECURITY.switch(),
        "let callers with a key fetch public web pages through this node (/v1/tools)"] = False
    web_tools_ports: Annotated[tuple[int, ...], SECURITY.text("PORT", values.whole(1, 65535), toml=(int,),
        name="web_tools_port"),
        "a port that the web tools may call besides 80 and 443"] = ()
    web_search: Annotated[str, SECURITY.matching("SERVICE",
        r"ddgs|brave|tavily|https?://[^\s/@,]+(/[^\s@,]*)?",
        "ddgs, brave, tavily or a URL such as http://127.0.0.1:8080"),
        "search service of the web tools: ddgs (without a key), brave, tavily, or the URL of a SearXNG"] = ""
    web_search_key_file: Annotated[Path | None, SECURITY.path("FILE"),
        "file with the API key of the search service"] = None
    trust_remote_code: Annotated[bool, SECURITY.switch(),
        "download a model's own code if the model's card allows it too; no engine of this version runs it"] = False

    engine: Annotated[str, ENGINES.text("NAME", _WORD),
        "engine of this machine: auto, or the name of an installed engine"] = "auto"
    engine_options: Annotated[dict[str, str], ENGINES.pairs("K=V", name="engine_option", private=True),
        "an option of the engine"] = field(default_factory=dict)
    model_engines: Annotated[dict[str, str], ENGINES.pairs("MODEL=ENGINE", name="model_engine"),
        "use this engine for one model on this machine"] = field(default_factory=dict)
    measure_engines: Annotated[str, ENGINES.one_of("WHEN", "on", "off"),
        "measure in quiet moments how fast each engine runs a model, for --engine auto, placement and previews: on or "
        "off"] = "on"
    mixed_rings: Annotated[str, ENGINES.one_of("WHEN", "auto", "never", shared=True),
        "allow different engines in one ring: auto = only if no single engine can run the model; never"] = "auto"
    tensor_group: Annotated[int, ENGINES.text("N", values.group_size, toml=(str, int), show=values.group_size_text),
        "how many peers form one stage (a tensor group): auto, never, or 2 to 8"] = 0
    group_backend: Annotated[WishedBackend, ENGINES.one_of("NAME", "auto", "ring", "jaccl", "jaccl-ring"),
        "how the peers of a tensor group communicate: auto = RDMA if available; ring = TCP; jaccl, jaccl-ring = "
        "RDMA"] = "auto"
    hostfile: Annotated[Path | None, ENGINES.path("FILE"),
        "a hostfile of mlx.launch: its hosts form one tensor group, in rank order"] = None
    openai_servers: Annotated[tuple[str, ...], ENGINES.matching("URL",
        r"https?://[^\s/@,]+(/[^\s@,]*)?", "a URL such as http://127.0.0.1:8000", name="openai_server"),
        "a model server with the OpenAI API, such as llama-server, vLLM or Ollama, whose models this node offers to "
        "the mesh; prompts and answers go there as text"] = ()
    openai_key_file: Annotated[Path | None, ENGINES.path("FILE"),
        "file with the API key of the servers of --openai-server"] = None
    llama_server: Annotated[str, ENGINES.matching("FILE", r"\S.*", "a program such as llama-server, or its path"),
        "the program llama-server; this node starts it for GGUF files in --models-dir"] = ""
    rkllm_server_host: Annotated[str, ENGINES.matching("ADDRESS", r"\S+", "an address or host name"),
        "address of a RKLLAMA server; by default one on an RK3588 or RK3576 board"] = ""
    rkllm_server_port: Annotated[int, ENGINES.port(), "port of the RKLLAMA server; 0 = 8080"] = 0
    stands_for: Annotated[dict[str, str], ENGINES.pairs("SERVED=MODEL"),
        "a served model is the same model as another one in the mesh, so that each can answer for the "
        "other"] = field(default_factory=dict)
    server_options: Annotated[dict[str, str], ENGINES.pairs("ENGINE.K=V", name="server_option"),
        "an option of an engine for model servers"] = field(default_factory=dict)
    fast_synch: Annotated[str, ENGINES.one_of("WHEN", "auto", "on", "off", bare="on", has_no_flag=True),
        "MLX_METAL_FAST_SYNCH for the engines: auto, on or off"] = "auto"

    max_memory_bytes: Annotated[int | None, MEMORY.size(values.size_or_zero, name="max_memory"),
        "most memory that models may use on this machine, such as 12GB; 0 = hold no layers"] = None
    memory_threshold: Annotated[float | None, MEMORY.number("SHARE", values.share),
        "share of memory in use that is critical; by default free memory decides"] = None
    memory_poll_interval: Annotated[float, MEMORY.number("SECONDS", values.seconds(0.1, 60.0)),
        "time between readings of the memory"] = 1.5
    spare_runners: Annotated[int, MEMORY.whole("N", 0, 8),
        "idle runners for each engine in use that have imported it already, for a faster start"] = 0

    models_dirs: Annotated[tuple[Path, ...], MODELS.path("DIR", name="models_dir"),
        "a directory that contains model directories, or one model directory"] = ()
    custom_model_cards_dir: Annotated[Path | None, MODELS.path("DIR"),
        "a directory with model cards, in addition to `cards` in the home"] = None
    fetch: Annotated[bool, MODELS.off_switch(),
        "download no model files to this machine, neither from the hub nor from peers"] = True
    models_max_bytes: Annotated[int | None, MODELS.size(name="models_max_size"),
        "most disk space for downloaded models; beyond it, unused ones are deleted"] = None
    evict_pinned: Annotated[bool, MODELS.switch(),
        "when making room, also delete models that were pulled by name"] = False
    store: Annotated[Path | None, MODELS.path("DIR"), "host the mesh's model store in this directory"] = None
    store_host: Annotated[str, MODELS.text("PEER", _NAME),
        "name or id (4 digits suffice) of the peer that hosts the store; by default any peer with one"] = ""
    store_enabled: Annotated[bool, MODELS.off_switch(name="no_store"), "neither use nor host a model store"] = True
    store_fallback: Annotated[bool, MODELS.off_switch(),
        "do not download from the hub what the store does not have"] = True
    store_cleanup: Annotated[bool, MODELS.off_switch(),
        "keep this node's copies of the store's models when nothing uses them"] = True
    store_keep_gb: Annotated[int, MODELS.whole("N", 0, 1_000_000),
        "GiB of unused copies of the store's models to keep, the newest first; 0 = none"] = 40
    default_model: Annotated[str, MODELS.matching("NAME", r"\S.{0,4095}", "the name of a model", shared=True),
        "model for requests that name none; by default the only model there is"] = ""
    default_temp: Annotated[float | None, MODELS.number("T", values.number(0.0, 2.0), shared=True),
        "temperature for requests that set none; by default what the model recommends"] = None
    system_prompt: Annotated[str, MODELS.matching("TEXT", r"(?s:.{1,65536})", "a text", shared=True, private=True),
        "system prompt for conversations that have none"] = ""
    keep_agent_lines: Annotated[bool, MODELS.switch(shared=True),
        "leave agents' billing and date lines at the start of prompts (not cacheable)"] = False
    control_tokens_in_text: Annotated[bool, MODELS.switch(),
        "let texts of chats act as control tokens of the model"] = False
    keep_responses: Annotated[int, MODELS.whole("SECONDS", 0, 10**8),
        "keep responses and threads this long after their last use; 0 = never"] = 86_400
    preload: Annotated[tuple[str, ...], MODELS.matching("MODEL", r"\S.{0,4095}", "the name of a model"),
        "load this model when the node starts, as soon as the mesh can hold it"] = ()
    idle_unload: Annotated[int, MODELS.whole("SECONDS", 0, 10**8),
        "unload models that this node placed after this long without use; 0 = never"] = 0
    min_peers: Annotated[int, MODELS.whole("N", 1, 1024, shared=True), "spread each model over at least N peers"] = 1
    placement: Annotated[str, MODELS.one_of("POLICY", "memory", "latency", "throughput", shared=True),
        "policy for how many peers a model gets: memory, latency or throughput"] = "memory"
    proportional_layers: Annotated[str, MODELS.one_of("WHEN", "on", "off", bare="on", has_no_flag=True),
        "on = divide layers by memory or speed; off = as evenly as memory allows"] = "on"
    auto_place: Annotated[bool, MODELS.off_switch(),
        "refuse requests for models without an instance; only POST /instance places models"] = True
    auto_replicas: Annotated[str, MODELS.one_of("WHEN", "on", "off", bare="on"),
        "on = place a further instance of a small model while its requests queue, and of one whose peers drain; off = "
        "only what requests and people ask for"] = "on"

    context_limit: Annotated[int | None, LIMITS.whole("N", 1, 10**9, shared=True),
        "most tokens of prompt + output; the model's own limit by default"] = None
    max_generate_tokens: Annotated[int, LIMITS.whole("N", 1, 10**9, alias="--max-output-tokens", shared=True),
        "most output tokens of a chat that sets no limit, if the context has room"] = 4096
    max_batch_size: Annotated[int, LIMITS.whole("N", 1, MOST_SEQUENCES),
        "requests that run at once on a ring whose last layers this node holds"] = MOST_SEQUENCES
    no_batch: Annotated[bool, LIMITS.switch(),
        "the same as --max-batch-size 1: requests of a model run strictly one after the other"] = False
    prefill_chunk: Annotated[int, LIMITS.whole("N", LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS),
        "most prompt tokens in one step of such a ring; fewer if these would delay streams"] = MOST_CHUNK_TOKENS
    draft: Annotated[str, LIMITS.one_of("WHERE", "auto", "suffix", "off"),
        "where such a ring takes drafts of the next tokens from, which never change a text: auto = the engine's own, "
        "else suffix = what came after the same tokens before; sent only while that is faster; off"] = "auto"
    prefix_cache_bytes: Annotated[int, LIMITS.size(values.cache_size, name="prefix_cache", show=values.cache_size_text),
        "most KV of ended requests that each stage here keeps for later prompts, such as 4GB; auto = what running "
        "requests leave of the KV pool; off"] = values.MOST_CACHE_BYTES
    prefix_disk: Annotated[Path | None, LIMITS.text("DIR", values.path_or_off, show=values.path_or_off_text),
        "keep such KV also in files below this directory, for prompts after a restart; off"] = None
    prefix_disk_max_bytes: Annotated[int, LIMITS.size(name="prefix_disk_max_size"),
        "most disk space for these files; the least recently used ones go first"] = 20 * 10**9
    prefix_disk_days: Annotated[int, LIMITS.whole("DAYS", 1, 3650),
        "time after which such a file is removed if no prompt has used it"] = 7
    skip_warmup: Annotated[bool, LIMITS.switch(),
        "serve a model as soon as it is loaded; its first request then waits for what engines build in their first "
        "steps"] = False
    max_queued: Annotated[int, LIMITS.whole("N", 1, 100_000),
        "requests that may wait per model, at its ring, and at each entry node while it loads; further ones get a "
        "429"] = 32
    queue_timeout: Annotated[int, LIMITS.whole("SECONDS", 1, 10**6),
        "longest wait of a request in the queue; then it gets a 429"] = 120
    prefill_timeout: Annotated[int, LIMITS.whole("SECONDS", 1, 10**6),
        "longest silence of a ring before the first token"] = 120
    token_timeout: Annotated[int, LIMITS.whole("SECONDS", 1, 10**6),
        "longest silence of a ring between two tokens"] = 30
    response_timeout: Annotated[int, LIMITS.whole("SECONDS", 1, 10**6),
        "longest duration of a request; then it ends with the output so far"] = 300

    log_format: Annotated[str, LOGGING.one_of("FORMAT", "console", "json", "both", shared=True),
        "console = text on stderr, json = JSON lines on stdout, both"] = "console"
    log_level: Annotated[str, LOGGING.one_of("LEVEL", "debug", "info", "warning", "error", shared=True),
        "lowest level that is logged: debug, info, warning or error"] = "info"
    log_file: Annotated[str, LOGGING.matching("FILE", r"\S.*", "a file, or none"),
        "also write the log to this file below the home, as JSON lines; or none"] = "none"
    log_file_max_bytes: Annotated[int, LOGGING.size(name="log_file_max_size"),
        "largest log file; then it becomes FILE.1 and a new one begins"] = 100_000_000
    log_files: Annotated[int, LOGGING.whole("N", 0, 1000), "how many older log files are kept, FILE.1 to FILE.N"] = 5
    log_retention_days: Annotated[int, LOGGING.whole("DAYS", 0, 36_500),
        "delete log files older than this and begin one each day; 0 = no limit"] = 30
    request_log: Annotated[str, LOGGING.matching("FILE", r"\S.*", "a file, or none"),
        "file below the home for one JSON line per request, without its text; or none"] = "logs/requests.jsonl"
    request_log_max: Annotated[int, LOGGING.whole("N", 1, 1_000_000),
        "how many recent requests are kept in memory, for /requests/recent"] = 10_000
    trace_sample: Annotated[float, LOGGING.number("SHARE", values.share, shared=True),
        "share of requests that are traced, for GET /v1/traces"] = 0.01
    trace_retention_days: Annotated[int, LOGGING.whole("DAYS", 0, 36_500),
        "how long traces are kept; 0 = until newer ones need the space"] = 3
    otlp_endpoint: Annotated[str, LOGGING.text("URL", values.collector, private=True),
        "OpenTelemetry collector for the traces, such as http://host:4318, or none"] = ""
    otlp_headers: Annotated[dict[str, str], LOGGING.pairs("K=V", name="otlp_header", private=True, secret=True),
        "a header for the collector, such as a key; `ps` shows flags to every "
        "user"] = field(default_factory=dict, repr=False)
    otlp_protocol: Annotated[str, LOGGING.one_of("NAME", "http/json", "http/protobuf"),
        "http/json, or http/protobuf (needs exo-mesh[otel])"] = "http/json"
    otlp_certificate: Annotated[Path | None, LOGGING.path("FILE"),
        "CA (PEM) that signed the collector's certificate; the system's by default"] = None
    otlp_service: Annotated[str, LOGGING.text("NAME", _NAME), "service.name of the exported traces"] = "exo-mesh"
    otlp_attributes: Annotated[dict[str, str], LOGGING.pairs("K=V", name="otlp_attribute", private=True),
        "a resource attribute to add to the exported traces"] = field(default_factory=dict)
    hang_debug: Annotated[int, LOGGING.whole("SECONDS", 0, 86400),
        "log the stacks of a runner without progress at this interval; 0 = never"] = 0
    image_transport_debug: Annotated[bool, LOGGING.switch(),
        "log a line for each image of a request: its size, pixels and checksum"] = False
    vision_debug_save_dir: Annotated[Path | None, LOGGING.path("DIR"),
        "write the last 200 images to this directory, as models get them (PPM)"] = None

    override_memory_bytes: Annotated[int | None, TESTS.size(name="override_memory"),
        "for tests: act as if this machine had this much memory"] = None
    fake_mem_file: Annotated[Path | None, TESTS.path("FILE"),
        "for tests: read total and available memory from this file each time"] = None
    # fmt: on


class LoadedSettings(msgspec.Struct, frozen=True):
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
