"""The table of all settings of a node: their names, their help and how their texts are parsed, by subject.

The defaults are in `config.Settings`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from exo_mesh.domain.addresses import LINK_WORDS
from exo_mesh.domain.device import ROLES
from exo_mesh.domain.footprint import LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS, MOST_SEQUENCES
from exo_mesh.settings import values
from exo_mesh.settings.setting import Setting

SECRET_MAPPINGS = frozenset({"otlp_header"})
"""Settings whose values are secret: only their keys are shown."""

_NAME = values.matching(r"[^\s\x00-\x1f](?:[^\x00-\x1f]{0,62}[^\s\x00-\x1f])?", "1-64 characters")
_WORD = values.matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a word of letters, digits, ., _ and -")


def _whole(name: str, metavar: str, text: str, low: int, high: int, **more: Any) -> Setting:
    """A setting that is a whole number from low to high."""
    return Setting(name, metavar, text, values.whole(low, high), toml=(int,), **more)


def _port(name: str, text: str, **more: Any) -> Setting:
    return _whole(name, "PORT", text, 0, 65535, **more)


def _switch(name: str, text: str) -> Setting:
    return Setting(name, "", text, values.switched_on, toml=(bool,), show=lambda on: str(on).lower())


def _negative(name: str, text: str, field: str) -> Setting:
    """A switch named `no_…` that turns off a field which is on by default."""
    return Setting(name, "", text, values.switched_off, field, (bool,), show=lambda on: str(not on).lower())


_NODE = (
    Setting("home", "DIR", "directory of the node id, models and caches; if set, also of config.toml", values.path),
    Setting("name", "NAME", "name of this node for people; the host name by default", _NAME),
    Setting("role", "ROLE", "what this node does: full; api = serve requests, hold no layers; edge = hold layers only "
        "of models that the other peers cannot hold", values.one_of(*ROLES)),
    _whole("stop_grace", "SECONDS", "how long a stopping node lets its streams finish; a second signal ends them",
        0, 86400),
    _switch("allow_sleep", "let this machine sleep while requests run"),
    Setting("power_tool", "WHAT", "program that reads power and temperature: auto = mactop or macmon if installed on a "
        "Mac, off, or the path of one", values.matching(r"auto|off|/\S.*", "auto, off or the path of a program")),
    Setting("sysfs", "DIR", "path of this machine's /sys; some containers have it elsewhere", values.path),
)  # fmt: skip

_NETWORK = (
    Setting("host", "ADDRESS", "address to listen on", values.matching(r"\S+", "an address or host name"),
        alias="--node-host"),
    _port("api_port", "port of the HTTP API; 0 = any free port", alias="--port"),
    _port("ollama_port", "a second port of the HTTP API, at which clients of Ollama look for it; 11434 if no number is "
        "given; off by default", bare="11434"),
    _negative("no_api", "do not serve the HTTP API", "api"),
    _switch("headless", "serve the API without the web page; GET / then answers 404"),
    Setting("page_languages", "TAG", "languages of the web page besides English; by default all that there are",
        values.matching(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8}){0,3}", "a language tag such as de or pt-BR"), separator=","),
    Setting("page_languages_dir", "DIR", "a directory with more languages of the web page, one file TAG.json each",
        values.path),
    _port("grpc_port", "port on which peers reach this node (gRPC); if taken, the next free one", alias="--node-port"),
    _negative("no_probe_datagrams", "probe idle peers by gRPC only, never by UDP datagrams; costs some CPU",
        "probe_datagrams"),
    Setting("data_ports", "A-B", "ports for the data streams between runners; any free ones by default",
        values.port_range, show=lambda ports: f"{ports[0]}-{ports[1]}"),
    Setting("discovery", "WAY", "how peers are found: udp, mdns, manual, tailscale, none",
        values.some_of("udp", "mdns", "manual", "tailscale", "none"), separator=","),
    _port("listen_port", "UDP port on which this node listens for announcements"),
    _port("broadcast_port", "UDP port to which this node sends announcements"),
    Setting("bootstrap_peers", "HOST:PORT", "peers to connect to, besides those that discovery finds", values.endpoint,
        separator=","),
    Setting("peers_file", "FILE", "peers to connect to: JSON, a hostfile or lines of host:port; re-read on change",
        values.path, alias="--discovery-config-path"),
    Setting("tailscale_api_key_file", "FILE", "file with a Tailscale API key, for --discovery tailscale", values.path),
    Setting("tailnet", "NAME", "the tailnet whose devices are listed; - = the tailnet of the API key",
        values.matching(r"[A-Za-z0-9@._-]{1,253}", "the name of a tailnet"), alias="--tailnet-name"),
    Setting("tailscale_api_url", "URL", "base URL of the Tailscale API",
        values.matching(r"https?://[^\s/]+\S*", "a URL such as https://api.tailscale.com")),
    Setting("node_id_filter", "PEER", "admit only this peer; its name or id (4 digits suffice); all by default",
        _NAME, separator=","),
    Setting("interface_type_filter", "TYPE", "connect to peers only over these kinds of links: thunderbolt, ethernet, "
        "wifi, bridge, vpn, loopback, other; all by default", values.one_of(*LINK_WORDS), separator=","),
    Setting("namespace", "NAME", "name of the mesh; a node ignores peers of other namespaces", _WORD),
    _whole("wait_for_peers", "N", "report not ready (/readyz, /health) until N other peers were seen", 0, 1024),
    _whole("discovery_timeout", "SECONDS", "how long --wait-for-peers waits; then ready without them; 0 = forever",
        0, 86400),
    _switch("offline", "download from peers only; the engines run offline, too"),
)  # fmt: skip

_SECURITY = (
    Setting("secret_file", "FILE", "file with the mesh secret: only peers with the same secret can join", values.path),
    Setting("tls_cert", "FILE", "serve the HTTP API over HTTPS with this certificate (PEM); re-read on change",
        values.path),
    Setting("tls_key", "FILE", "the private key of --tls-cert (PEM, without a passphrase)", values.path),
    _switch("open_admin", "on an open mesh, let everybody place, delete, drain and stop, over the API and from peers, "
        "not only read and chat"),
    Setting("open_paths", "WHAT", "what a closed mesh answers without a key: health, metrics, none",
        values.some_of("health", "metrics", "none"), separator=","),
    Setting("cors_origin", "ORIGIN", "let web pages of this origin call the HTTP API, like those of localhost",
        values.origin, "cors_origins", separator=","),
    Setting("allowed_hosts", "NAME", "a host name that clients may use for this API, or *; local names always work",
        values.host_name, separator=","),
    _switch("web_tools", "let callers with a key fetch public web pages through this node (/v1/tools)"),
    Setting("web_tools_port", "PORT", "a port that the web tools may call besides 80 and 443", values.whole(1, 65535),
        "web_tools_ports", (int,), separator=","),
    Setting("web_search", "SERVICE", "search service of the web tools: brave, tavily, or the URL of a SearXNG",
        values.matching(r"brave|tavily|https?://[^\s/@,]+(/[^\s@,]*)?",
                        "brave, tavily or a URL such as http://127.0.0.1:8080")),
    Setting("web_search_key_file", "FILE", "file with the API key of the search service", values.path),
    _switch("trust_remote_code", "download a model's own code if the model's card allows it too; no engine of this "
        "version runs it"),
)  # fmt: skip

_ENGINES = (
    Setting("engine", "NAME", "engine of this machine: auto, or the name of an installed engine", _WORD),
    Setting("engine_option", "K=V", "an option of the engine", values.option, "engine_options", separator=","),
    Setting("model_engine", "MODEL=ENGINE", "use this engine for one model on this machine", values.option,
        "model_engines", separator=","),
    Setting("measure_engines", "WHEN", "measure in quiet moments how fast each engine runs a model, for --engine auto, "
        "placement and previews: on or off", values.one_of("on", "off")),
    Setting("mixed_rings", "WHEN", "allow different engines in one ring: auto = only if no single engine can run the "
        "model; never", values.one_of("auto", "never")),
    Setting("tensor_group", "N", "how many peers form one stage (a tensor group): auto, never, or 2 to 8",
        values.group_size, toml=(str, int), show=values.group_size_text),
    Setting("group_backend", "NAME", "how the peers of a tensor group communicate: auto = RDMA if available; ring = "
        "TCP; jaccl, jaccl-ring = RDMA", values.one_of("auto", "ring", "jaccl", "jaccl-ring")),
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
    _port("rkllm_server_port", "port of the RKLLAMA server; 0 = 8080"),
    Setting("stands_for", "SERVED=MODEL", "a served model is the same model as another one in the mesh, so that each "
        "can answer for the other", values.option, separator=","),
    Setting("server_option", "ENGINE.K=V", "an option of an engine for model servers", values.option, "server_options",
        separator=","),
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
    _whole("spare_runners", "N", "idle runners that have imported the engine already, for a faster recovery", 0, 8),
)  # fmt: skip

_MODELS = (
    Setting("models_dir", "DIR", "a directory that contains model directories, or one model directory", values.path,
        "models_dirs", separator=os.pathsep),
    Setting("custom_model_cards_dir", "DIR", "a directory with model cards, in addition to `cards` in the home",
        values.path),
    _negative("no_fetch", "download no model files to this machine, neither from the hub nor from peers", "fetch"),
    Setting("models_max_size", "SIZE", "most disk space for downloaded models; beyond it, unused ones are deleted",
        values.size, "models_max_bytes", (str, int)),
    _switch("evict_pinned", "when making room, also delete models that were pulled by name"),
    Setting("store", "DIR", "host the mesh's model store in this directory", values.path),
    Setting("store_host", "PEER", "name or id (4 digits suffice) of the peer that hosts the store; by default any peer "
        "with one", _NAME),
    _negative("no_store", "neither use nor host a model store", "store_enabled"),
    _negative("no_store_fallback", "do not download from the hub what the store does not have", "store_fallback"),
    _negative("no_store_cleanup", "keep this node's copies of the store's models when nothing uses them",
        "store_cleanup"),
    _whole("store_keep_gb", "N", "GiB of unused copies of the store's models to keep, the newest first; 0 = none",
        0, 1_000_000),
    Setting("default_model", "NAME", "model for requests that name none; by default the only model there is",
        values.matching(r"\S.{0,4095}", "the name of a model")),
    Setting("default_temp", "T", "temperature for requests that set none; by default what the model recommends",
        values.number(0.0, 2.0), toml=(int, float)),
    Setting("system_prompt", "TEXT", "system prompt for conversations that have none",
        values.matching(r"(?s:.{1,65536})", "a text")),
    _switch("keep_agent_lines", "leave agents' billing and date lines at the start of prompts (not cacheable)"),
    _switch("control_tokens_in_text", "let texts of chats act as control tokens of the model"),
    _whole("keep_responses", "SECONDS", "keep responses and threads this long after their last use; 0 = never",
        0, 10**8),
    Setting("preload", "MODEL", "load this model when the node starts, as soon as the mesh can hold it",
        values.matching(r"\S.{0,4095}", "the name of a model"), separator=","),
    _whole("idle_unload", "SECONDS", "unload models that this node placed after this long without use; 0 = never",
        0, 10**8),
    _whole("min_peers", "N", "spread each model over at least N peers", 1, 1024),
    Setting("placement", "POLICY", "policy for how many peers a model gets: memory, latency or throughput",
        values.one_of("memory", "latency", "throughput")),
    Setting("proportional_layers", "WHEN", "on = divide layers by memory or speed; off = as evenly as memory allows",
        values.one_of("on", "off"), bare="on"),
    _negative("no_auto_place", "refuse requests for models without an instance; only POST /instance places models",
        "auto_place"),
    Setting("auto_replicas", "WHEN", "on = place a further instance of a small model while its requests queue; off = "
        "only what requests and people ask for", values.one_of("on", "off"), bare="on"),
)  # fmt: skip

_LIMITS = (
    _whole("context_limit", "N", "most tokens of prompt + output; the model's own limit by default", 1, 10**9),
    _whole("max_generate_tokens", "N", "most output tokens of a chat that sets no limit, if the context has room",
        1, 10**9, alias="--max-output-tokens"),
    _whole("max_batch_size", "N", "requests that run at once on a ring whose last layers this node holds",
        1, MOST_SEQUENCES),
    _switch("no_batch", "the same as --max-batch-size 1: requests of a model run strictly one after the other"),
    _whole("prefill_chunk", "N", "most prompt tokens in one step of such a ring; fewer if these would delay streams",
        LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS),
    Setting("prefix_cache", "SIZE", "most KV of ended requests that each stage here keeps for later prompts, such as "
        "4GB; auto = what running requests leave of the KV pool; off", values.cache_size, "prefix_cache_bytes",
        (str, int), show=values.cache_size_text),
    Setting("prefix_disk", "DIR", "keep such KV also in files below this directory, for prompts after a restart; off",
        values.path_or_off, show=lambda path: "off" if path is None else str(path)),
    Setting("prefix_disk_max_size", "SIZE", "most disk space for these files; the least recently used ones go first",
        values.size, "prefix_disk_max_bytes", (str, int)),
    _whole("prefix_disk_days", "DAYS", "time after which such a file is removed if no prompt has used it", 1, 3650),
    _switch("skip_warmup", "serve a model as soon as it is loaded; its first request then waits for what engines "
        "build in their first steps"),
    _whole("max_queued", "N", "requests that may wait per model, at its ring, and at each entry node while it loads; "
        "further ones get a 429", 1, 100_000),
    _whole("queue_timeout", "SECONDS", "longest wait of a request in the queue; then it gets a 429", 1, 10**6),
    _whole("prefill_timeout", "SECONDS", "longest silence of a ring before the first token", 1, 10**6),
    _whole("token_timeout", "SECONDS", "longest silence of a ring between two tokens", 1, 10**6),
    _whole("response_timeout", "SECONDS", "longest duration of a request; then it ends with the output so far",
        1, 10**6),
)  # fmt: skip

_LOGGING = (
    Setting("log_format", "FORMAT", "console = text on stderr, json = JSON lines on stdout, both",
        values.one_of("console", "json", "both")),
    Setting("log_level", "LEVEL", "lowest level that is logged: debug, info, warning or error",
        values.one_of("debug", "info", "warning", "error")),
    Setting("log_file", "FILE", "also write the log to this file below the home, as JSON lines; or none",
        values.matching(r"\S.*", "a file, or none")),
    Setting("log_file_max_size", "SIZE", "largest log file; then it becomes FILE.1 and a new one begins", values.size,
        "log_file_max_bytes", (str, int)),
    _whole("log_files", "N", "how many older log files are kept, FILE.1 to FILE.N", 0, 1000),
    _whole("log_retention_days", "DAYS", "delete log files older than this and begin one each day; 0 = no limit",
        0, 36_500),
    Setting("request_log", "FILE", "file below the home for one JSON line per request, without its text; or none",
        values.matching(r"\S.*", "a file, or none")),
    _whole("request_log_max", "N", "how many recent requests are kept in memory, for /requests/recent", 1, 1_000_000),
    Setting("trace_sample", "SHARE", "share of requests that are traced, for GET /v1/traces", values.share,
        toml=(int, float)),
    _whole("trace_retention_days", "DAYS", "how long traces are kept; 0 = until newer ones need the space", 0, 36_500),
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
    _whole("hang_debug", "SECONDS", "log the stacks of a runner without progress at this interval; 0 = never",
        0, 86400),
    _switch("image_transport_debug", "log a line for each image of a request: its size, pixels and checksum"),
    Setting("vision_debug_save_dir", "DIR", "write the last 200 images to this directory, as models get them (PPM)",
        values.path),
)  # fmt: skip

_TESTS = (
    Setting("override_memory", "SIZE", "for tests: act as if this machine had this much memory", values.size,
        "override_memory_bytes", (str, int)),
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
