"""Flags > EXO_MESH_* > config.toml > defaults; what cannot be used is refused with its source."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from exo_mesh.cli.main import main
from exo_mesh.cli.parser import Parser, add_node_flags, node_flags
from exo_mesh.cli.wiring import check_options
from exo_mesh.engine.registry import load_registry
from exo_mesh.settings import values
from exo_mesh.settings.aliases import ALIASES
from exo_mesh.settings.config import ConfigError, LoadedSettings, Settings, default_settings
from exo_mesh.settings.effective import SHARED
from exo_mesh.settings.loading import load_settings
from exo_mesh.settings.setting import Setting
from exo_mesh.settings.spelling import did_you_mean
from exo_mesh.settings.table import GROUPS, SETTINGS
from tools import settings_page


def load(home: Path, flags: dict[str, str] | None = None, environ: dict[str, str] | None = None) -> LoadedSettings:
    texts = {name: [text] for name, text in (flags or {}).items()}
    return load_settings({"home": [str(home)], **texts}, environ or {})


@pytest.mark.parametrize(
    ("flag", "variable", "key", "port", "origin"),
    [
        ("1111", "2222", "3333", 1111, "flag --api-port"),
        (None, "2222", "3333", 2222, "environment EXO_MESH_API_PORT"),
        (None, None, "3333", 3333, "{home}/config.toml:api_port"),
        (None, "", "3333", 3333, "{home}/config.toml:api_port"),
        (None, None, None, 52415, "default"),
        ("1111", None, None, 1111, "flag --api-port"),
    ],
)
def test_the_nearest_source_wins_and_is_remembered(
    tmp_path: Path, flag: str | None, variable: str | None, key: str | None, port: int, origin: str
) -> None:
    if key is not None:
        (tmp_path / "config.toml").write_text(f"api_port = {key}\n")
    flags = {} if flag is None else {"api_port": flag}
    environ = {} if variable is None else {"EXO_MESH_API_PORT": variable}
    loaded = load(tmp_path, flags, environ)
    assert loaded.settings.api_port == port
    assert loaded.origins["api_port"] == origin.format(home=tmp_path)
    assert loaded.was_set("api_port") == (origin != "default")


EXAMPLES = (
    "true", "2", "100", "0.5", "12GB", "/srv/x", "7000-7010", "a:1", "https://a.example", "http://127.0.0.1:8",
    "http://a/v1/traces", "a=b=c", "example.org", "de",
)  # fmt: skip
"""Texts of the kinds of settings. A setting of a new kind needs one more."""


def example_of(setting: Setting) -> str:
    """A text that the setting takes and shows again as it is, with another value than the default."""
    usual = default_settings()
    for text in (*setting.words, *EXAMPLES):
        try:
            value = setting.from_texts([text])
        except ValueError:
            continue
        settings = replace(usual, **{setting.field: value})
        if value != setting.value(usual) and (setting.text(settings) == text or "SIZE" in setting.metavar):
            return text
    raise AssertionError(f"{setting.name}: add a text that it takes to EXAMPLES")


def test_every_setting_can_be_set_in_each_of_the_three_ways(tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_text("0f5c8bb0a1f3fd0c0a6b8a1d3f0e4a77")
    checked_together = {"secret_file": str(secret), "grpc_port": "3", "ollama_port": "4", "max_batch_size": "1"}
    texts = {name: example_of(setting) for name, setting in SETTINGS.items() if name != "home"} | checked_together
    by_flag, usual = load(tmp_path, texts).settings, default_settings()
    assert load(tmp_path, {}, {SETTINGS[name].variable: text for name, text in texts.items()}).settings == by_flag
    lines = [f"{name} = " + (f"'{text}'" if str in SETTINGS[name].toml else text) for name, text in texts.items()]
    (tmp_path / "config.toml").write_text("\n".join(lines))
    assert load(tmp_path).settings == by_flag
    for name, text in texts.items():
        assert SETTINGS[name].value(by_flag) == SETTINGS[name].from_texts([text]) != SETTINGS[name].value(usual), name


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("name", "alpha", "name", "alpha"),
        ("api_port", "1", "api_port", 1),
        ("no_api", "true", "api", False),
        ("no_store", "true", "store_enabled", False),
        ("open_admin", "true", "open_admin", True),
        ("data_ports", "7000-7010", "data_ports", (7000, 7010)),
        ("discovery", "none", "discovery", ()),
        ("bootstrap_peers", "a:1,[::1]:2", "bootstrap_peers", ("a:1", "[::1]:2")),
        ("tls_cert", "/etc/cert.pem", "tls_cert", Path("/etc/cert.pem")),
        ("open_paths", "health", "open_paths", ("health",)),
        ("cors_origin", "https://a.example,http://b:3000", "cors_origins", ("https://a.example", "http://b:3000")),
        ("web_tools_port", "8443", "web_tools_ports", (8443,)),
        ("page_languages", "de,pt-BR", "page_languages", ("de", "pt-BR")),
        ("engine_option", "a=1,b=x=y", "engine_options", {"a": "1", "b": "x=y"}),
        ("tensor_group", "never", "tensor_group", 1),
        ("max_memory", "12GB", "max_memory_bytes", 12 * 10**9),
        ("models_dir", "/a:/b", "models_dirs", (Path("/a"), Path("/b"))),
        ("models_max_size", "5GiB", "models_max_bytes", 5 * 2**30),
        ("default_temp", "0.5", "default_temp", 0.5),
        ("placement", "Throughput", "placement", "throughput"),
        ("prefix_disk", "/data/kv", "prefix_disk", Path("/data/kv")),
        ("otlp_header", "api-key=a=b,x=y", "otlp_headers", {"api-key": "a=b", "x": "y"}),
    ],
)
def test_the_texts_of_each_kind_of_setting_become_these_values(name: str, text: str, field: str, value: object) -> None:
    assert SETTINGS[name].field == field
    assert SETTINGS[name].from_texts([text]) == value


def test_every_field_but_the_secret_itself_declares_a_setting_with_help_and_a_group() -> None:
    assert {setting.field for setting in SETTINGS.values()} == {*Settings.__dataclass_fields__} - {"secret"}
    for setting in SETTINGS.values():
        assert setting.help and setting in GROUPS[setting.group], setting.name
        assert setting.is_switch or setting.metavar, setting.name
    assert [setting for group in GROUPS.values() for setting in group] == [*SETTINGS.values()], "groups stand together"
    names = [key for setting in SETTINGS.values() for key in setting.keys]
    assert len(names) == len({*names})


def test_the_table_of_the_model_store_stands_for_its_settings(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        'name = "alpha"\n[model_store]\nenabled = true\nhost = "alpha"\npath = "/data"\nallow_hub_fallback = false\n'
        "[model_store.staging]\ncleanup_on_deactivate = false\nkeep_recent_gb = 0\n"
    )
    settings = load(tmp_path).settings
    assert (settings.store_enabled, settings.store_host, settings.store) == (True, "alpha", Path("/data"))
    assert (settings.store_fallback, settings.store_cleanup, settings.store_keep_gb) == (False, False, 0)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[model_store]\nport = 58080", 'no setting "model_store.port"; the table has: enabled, host, path'),
        ("model_store = 1", "model_store must be a table"),
        ("[model_store]\nstaging = 1", "model_store.staging must be a table"),
        ("[model_store]\nenabled = 'yes'", "true or false is needed"),
        ("[model_store.staging]\nkeep_recent_gb = -1", "a whole number from 0"),
        ("store_host = 'a'\n[model_store]\nhost = 'b'", "store_host and the table [model_store] set the same thing"),
    ],
)
def test_a_wrong_table_of_the_model_store_is_refused(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "name", "text"),
    [
        (["--node-host", "127.0.0.1"], "host", "127.0.0.1"),
        (["--node-port", "5001"], "grpc_port", "5001"),
        (["--port", "8000"], "api_port", "8000"),
        (["--tailnet-name", "example.org"], "tailnet", "example.org"),
        (["--fast-synch"], "fast_synch", "on"),
        (["--fast-synch", "off"], "fast_synch", "off"),
        (["--fast-synch", "--no-api"], "fast_synch", "on"),
        (["--no-fast-synch"], "fast_synch", "off"),
        (["--proportional-layers"], "proportional_layers", "on"),
        (["--no-proportional-layers"], "proportional_layers", "off"),
        (["--ollama-port"], "ollama_port", "11434"),
        (["--ollama-port", "0"], "ollama_port", "0"),
        (["--max-memory", "0"], "max_memory", "0"),
        (["-v"], "log_level", "debug"),
        (["-vv"], "log_level", "debug"),
        (["-vvv"], "log_level", "debug"),
    ],
)
def test_flags_of_older_programs_set_our_settings(tmp_path: Path, flags: list[str], name: str, text: str) -> None:
    parser = Parser(prog="exo-mesh serve")
    add_node_flags(parser)
    given = node_flags(parser.parse_all([*flags, "--home", str(tmp_path)]))
    assert SETTINGS[name].text(load_settings(given, {}).settings) == text


def test_a_number_in_debug_asks_for_all_lines_and_a_name_in_it_is_not_meant_for_us(tmp_path: Path) -> None:
    levels = {text: load(tmp_path, {}, {"DEBUG": text}).settings.log_level for text in ("1", "9", "0", "app:*", "true")}
    assert levels == {"1": "debug", "9": "debug", "0": "info", "app:*": "info", "true": "info"}


def test_one_request_at_a_time_and_several_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--no-batch runs one request at a time, but --max-batch-size is 4"):
        load(tmp_path, {"no_batch": "true", "max_batch_size": "4"})


def test_zero_in_the_variable_of_proportional_layers_means_an_even_split(tmp_path: Path) -> None:
    found = {text: load(tmp_path, {}, {"PROPORTIONAL_LAYERS": text}).settings for text in ("0", "1", "maybe")}
    assert [one.proportional_layers for one in found.values()] == ["off", "on", "on"]


def test_a_variable_of_others_that_changes_nothing_is_a_warning(tmp_path: Path) -> None:
    (warning,) = load(tmp_path, {}, {"RDMA_DEVICES": "rdma_en5"}).warnings
    assert warning.startswith("RDMA_DEVICES is set but not used") and "--hostfile FILE" in warning


def test_config_toml_may_use_lists_and_a_table(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        'models_dir = ["/a", "/b"]\nbootstrap_peers = []\nmax_memory = 1000\n[engine_option]\nstep_ms = "3"\n'
    )
    settings = load(tmp_path).settings
    assert settings.models_dirs == (Path("/a"), Path("/b"))
    assert settings.bootstrap_peers == ()
    assert settings.max_memory_bytes == 1000
    assert settings.engine_options == {"step_ms": "3"}


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("api_port", "http", "a whole number from 0 to 65535 is needed"),
        ("memory_poll_interval", "0", "seconds from 0.1 to 60 are needed"),
        ("memory_threshold", "75", "a number from 0 to 1 is needed"),
        ("api_port", "65536", "a whole number from 0 to 65535 is needed"),
        ("api_port", "-1", "a whole number from 0 to 65535 is needed"),
        ("api_port", "٣", "a whole number"),
        ("min_peers", "0", "a whole number from 1"),
        ("max_memory", "12G", "a size such as 12GB"),
        ("prefix_cache", "4G", "auto, off or a size such as 4GB"),
        ("models_max_size", "0", "more than zero"),
        ("role", "master", "must be one of full, api, edge"),
        ("max_batch_size", "33", "a whole number from 1 to 32"),
        ("prefill_chunk", "8", "a whole number from 16 to 512"),
        ("data_ports", "9-7", "a range of ports"),
        ("data_ports", "7000", "a range of ports"),
        ("bootstrap_peers", "host", "host:port is needed"),
        ("bootstrap_peers", "a:1,fe80::1:5", "host:port is needed"),
        ("bootstrap_peers", "a:0", "host:port is needed"),
        ("engine_option", "x", "key=value is needed"),
        ("openai_server", "127.0.0.1:8000", "a URL such as"),
        ("openai_server", "http://user:password@host", "a URL such as"),
        ("discovery", "pigeon", "must be one of udp, mdns, manual, tailscale, none"),
        ("placement", "best", "must be one of memory, latency, throughput"),
        ("no_api", "maybe", "must be one of"),
        ("namespace", "a b", "a word of letters"),
        ("name", "x" * 65, "1-64 characters"),
        ("log_format", "xml", "must be one of console, json, both"),
        ("otlp_endpoint", "collector:4318", "a URL such as http://127.0.0.1:4318"),
    ],
)
def test_a_bad_value_names_its_source_and_what_is_needed(tmp_path: Path, name: str, text: str, what: str) -> None:
    setting = SETTINGS[name]
    for sources, prefix in (
        (({name: text}, {}), f"{setting.flag} {text}: "),
        (({}, {setting.variable: text}), f"{setting.variable}={text}: "),
    ):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, *sources)
        assert str(caught.value).startswith(prefix)
        assert what in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("api_prot = 1", 'no setting "api_prot"; did you mean api_port?'),
        ("api-port = 1", 'no setting "api-port"; did you mean api_port?'),
        ("zzz = 1", 'no setting "zzz"'),
        ("no_loopback_exemption = true", "being on this machine gives no rights any more; leave it out"),
        ("home = '/x'", "home cannot be set in here"),
        ("api_port = 'x", "not valid TOML"),
        ("api_port = '52415'", 'api_port = "52415": a whole number (PORT) is needed, not a string in quotes'),
        ("api_port = true", "api_port = true: a whole number (PORT) is needed, not true or false"),
        ("no_api = 1", "no_api = 1: true or false is needed, not a whole number"),
        ("bootstrap_peers = [1]", "a string in quotes (HOST:PORT) is needed, not a whole number"),
        ("api_port = 70000", "api_port = 70000: a whole number from 0 to 65535 is needed"),
    ],
)
def test_a_bad_config_file_is_refused_with_its_path(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.toml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.toml: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(("given", "missing"), [("tls_cert", "--tls-key"), ("tls_key", "--tls-cert")])
def test_a_certificate_without_its_key_is_refused(tmp_path: Path, given: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        load(tmp_path, {given: "/etc/some.pem"})


def test_an_unknown_variable_is_a_warning_with_a_suggestion(tmp_path: Path) -> None:
    loaded = load(tmp_path, {}, {"EXO_MESH_API_PROT": "1", "EXO_MESH_API_PORT": "2"})
    assert loaded.warnings == (
        "EXO_MESH_API_PROT is set, but there is no such setting; did you mean EXO_MESH_API_PORT?",
    )
    assert loaded.settings.api_port == 2
    others = {
        "EXO_MESH_API_URL": "http://elsewhere",
        "EXO_LIKE": "1",
        "EXO_MESH_SECRET": "0" * 15 + "f5c8bb0a1f3fd0c0a6",
    }
    assert load(tmp_path, {}, others).warnings == ()


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.alias])
def test_the_name_of_a_second_flag_works_everywhere(tmp_path: Path, name: str) -> None:
    setting = SETTINGS[name]
    _, variable = setting.variables
    text = {"host": "127.0.0.1", "peers_file": "/p", "tailnet": "t"}.get(name, "17")
    loaded = load(tmp_path, {}, {variable: text})
    assert setting.text(loaded.settings) == text
    assert (loaded.origins[name], loaded.warnings) == (f"environment {variable}", ())
    assert load(tmp_path, {}, {variable: text, setting.variable: "18"}).origins[name].endswith(setting.variable)
    key = f"{setting.keys[1]} = {text if text.isdecimal() else repr(text)}\n"
    (tmp_path / "config.toml").write_text(key)
    assert setting.text(load(tmp_path).settings) == text
    (tmp_path / "config.toml").write_text(key + key.replace(setting.keys[1], name))
    with pytest.raises(ConfigError, match="set the same thing"):
        load(tmp_path)


SERVICES = ("EXO_MESH", "EXO_MESH_API", "EXO_MESH_GRPC", "EXO_MESH_OLLAMA", "EXO_MESH_NODE", "RKLLM_SERVER", "CTRL")


@pytest.mark.parametrize("service", SERVICES)
def test_variables_that_describe_a_service_are_no_settings(tmp_path: Path, service: str) -> None:
    links = {
        f"{service}_SERVICE_HOST": "10.96.0.7",
        f"{service}_SERVICE_PORT": "52415",
        f"{service}_SERVICE_PORT_HTTP": "52415",
        f"{service}_PORT": "tcp://10.96.0.7:52415",
        f"{service}_PORT_52415_TCP": "tcp://10.96.0.7:52415",
        f"{service}_PORT_52415_TCP_ADDR": "10.96.0.7",
        f"{service}_PORT_52415_TCP_PORT": "52415",
        f"{service}_PORT_52415_TCP_PROTO": "tcp",
    }
    loaded, plain = load(tmp_path, {}, links), load(tmp_path)
    assert loaded.settings == plain.settings and loaded.warnings == plain.warnings == ()


def test_a_port_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^EXO_MESH_PORT=http: "):
        load(tmp_path, {}, {"EXO_MESH_PORT": "http"})


def test_an_alias_that_begins_like_our_variables_is_not_called_unknown(tmp_path: Path) -> None:
    for alias in ALIASES:
        if alias.variable.startswith("EXO_MESH_"):
            assert load(tmp_path, {}, {alias.variable: "1"}).warnings == ()
    assert load(tmp_path, {}, {"EXO_MESH_LLAMA_SERVER_BIN": "/x"}).settings.llama_server == "/x"


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("EXO_MESH_API_PROT", "EXO_MESH_API_PORT"), ("EXO_MESH_MAX_QUEUD", "EXO_MESH_MAX_QUEUED"),
        ("EXO_MESH_PREFIX_CACHES", "EXO_MESH_PREFIX_CACHE"), ("EXO_MESH_CACHE_BACKEND", ""), ("EXO_MESH_API_HOST", ""),
        ("EXO_MESH_KV_CACHE", ""), ("EXO_MESH_LOG_DIRECTORY", ""), ("EXO_MESH_X", ""), ("EXO_MESH_", ""),
    ],
)  # fmt: skip
def test_only_a_typing_error_or_a_beginning_gets_a_hint(word: str, near: str) -> None:
    variables = [variable for setting in SETTINGS.values() for variable in setting.variables]
    assert did_you_mean(word, variables) == (f"; did you mean {near}?" if near else "")
    flag = f"--{word.removeprefix('EXO_MESH_').lower().replace('_', '-')}"
    assert bool(did_you_mean(flag, [setting.flag for setting in SETTINGS.values()])) == bool(near)


WRONG_OPTIONS = {
    "llamacpp": "kv=q8_0", "numpy": "mode=exact", "torch": "dtype=int3", "mlx": "batching=off", "dummy": "cost_ms=x"
}  # fmt: skip


@pytest.mark.parametrize("engine", WRONG_OPTIONS)
def test_a_wrong_option_of_an_engine_ends_the_start(tmp_path: Path, engine: str) -> None:
    settings = load(tmp_path, {"engine": engine, "engine_option": WRONG_OPTIONS[engine]}).settings
    with pytest.raises(ConfigError, match=f"--engine-option of {engine}: "):
        check_options(load_registry(), settings)


def test_an_option_is_for_any_of_the_engines_in_use(tmp_path: Path) -> None:
    flags = {"engine": "numpy", "engine_option": "cost_ms=1"}
    check_options(load_registry(), load(tmp_path, {**flags, "model_engine": "a/b=dummy"}).settings)
    for others in ({}, {"model_engine": "a/b=numpy"}):
        with pytest.raises(ConfigError, match="--engine-option of numpy: "):
            check_options(load_registry(), load(tmp_path, {**flags, **others}).settings)
    with pytest.raises(ConfigError, match=r"--engine-option of numpy: .*; dummy: "):
        check_options(
            load_registry(),
            load(tmp_path, {"engine": "numpy", "engine_option": "no=1", "model_engine": "a/b=dummy"}).settings,
        )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("opnai.slots=2", "must begin with the name of an engine and a dot"),
        ("slots=2", "must begin with the name of an engine and a dot"),
        ("openai.slot=2", "openai has no option"),
        ("rkllm.port=x", "is not a port"),
    ],
)
def test_a_wrong_option_for_model_servers_ends_the_start(tmp_path: Path, option: str, message: str) -> None:
    settings = load(tmp_path, {"engine": "dummy", "server_option": option}).settings
    with pytest.raises(ConfigError, match=message):
        check_options(load_registry(), settings)
    check_options(load_registry(), load(tmp_path, {"engine": "dummy", "server_option": "openai.slots=2"}).settings)


@pytest.mark.parametrize("source", ["flag", "variable", "alias", "file", "default"])
def test_an_alias_is_weaker_than_our_variable_and_stronger_than_the_file(tmp_path: Path, source: str) -> None:
    """Every layer from `source` down says something else; `source` wins."""
    layers = ["flag", "variable", "alias", "file", "default"]
    there = layers[layers.index(source) :]
    environ = {"EXO_MESH_MAX_QUEUED": "2"} if "variable" in there else {}
    environ |= {"MAX_QUEUE_DEPTH": "3", "QUEUE_MAX": "4"} if "alias" in there else {}
    if "file" in there:
        (tmp_path / "config.toml").write_text("max_queued = 5\n")
    loaded = load(tmp_path, {"max_queued": "1"} if "flag" in there else {}, environ)
    expected = {"flag": 1, "variable": 2, "alias": 3, "file": 5, "default": 32}
    assert loaded.settings.max_queued == expected[source]
    if source == "alias":
        assert loaded.origins["max_queued"] == "environment MAX_QUEUE_DEPTH"


@pytest.mark.parametrize(
    ("variable", "text", "setting", "value"),
    [
        ("HOST", "192.168.1.5", "host", "192.168.1.5"),
        ("HOST", "x86_64-conda-linux-gnu", "host", "default"),
        ("CTRL_HOST", "localhost", "host", "localhost"),
        ("PORT", "8000", "api_port", "8000"),
        ("PORT", "", "api_port", "default"),
        ("CTRL_PORT", "18080", "grpc_port", "18080"),
        ("OVERRIDE_MEMORY_MB", "16384", "override_memory", str(2**34)),
        ("MEMORY_THRESHOLD", "0.30", "memory_threshold", "0.3"),
        ("MEMORY_POLL_INTERVAL", "1.5", "memory_poll_interval", "1.5"),
        ("REQUEST_LOG_PATH", "logs/r.jsonl", "request_log", "logs/r.jsonl"),
        ("REQUEST_LOG_MAX", "10000", "request_log_max", "10000"),
        ("REQUEST_TIMEOUT_S", "120", "response_timeout", "120"),
        ("REQ_TIMEOUT", "60", "response_timeout", "60"),
        ("HF_HUB_OFFLINE", "1", "offline", "true"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318/otlp/", "otlp_endpoint", "http://c:4318/otlp/v1/traces"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://c/v1/traces", "otlp_endpoint", "https://c/v1/traces"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "c:4317", "otlp_endpoint", "default"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Basic%20eA==, b=", "otlp_header", "Authorization=Basic eA=="),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "otlp_protocol", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "otlp_protocol", "default"),
        ("OTEL_SERVICE_NAME", "studio", "otlp_service", "studio"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a.b=c%20d,e=f", "otlp_attribute", "a.b=c d,e=f"),
        ("OTEL_TRACES_SAMPLER", "parentbased_always_on", "trace_sample", "1.0"),
        ("OTEL_TRACES_SAMPLER", "traceidratio", "trace_sample", "default"),
        ("OTEL_TRACES_SAMPLER_ARG", "0.25", "trace_sample", "0.25"),
        ("HF_HUB_OFFLINE", "0", "offline", "default"),
        ("TRANSFORMERS_OFFLINE", "yes", "offline", "true"),
        ("MODEL_DIR", "/data/models", "models_dir", "/data/models"),
        ("MODEL_ID", "Qwen/Qwen3-0.6B", "default_model", "Qwen/Qwen3-0.6B"),
        ("MODEL_ID", "qwen3:0.6b", "default_model", "qwen3:0.6b"),
        ("MODEL_ID", "/data/models/tiny", "default_model", "/data/models/tiny"),
        ("MODEL_ID", "no model!", "default_model", "default"),
        ("MAX_TOKENS", "512", "max_generate_tokens", "512"),
        ("MAX_TOKENS", "none", "max_generate_tokens", "default"),
    ],
)
def test_aliases_are_read_as_their_programs_mean_them(
    tmp_path: Path, variable: str, text: str, setting: str, value: str
) -> None:
    loaded = load(tmp_path, {}, {variable: text})
    if value == "default":
        assert not loaded.was_set(setting)
    else:
        assert SETTINGS[setting].text(loaded.settings) == value
        assert loaded.origins[setting] == f"environment {variable}"


def test_a_models_own_directory_as_alias_means_the_one_it_is_in(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    loaded = load(tmp_path, {}, {"MODEL_DIR": str(tmp_path / "models" / "tiny")})
    assert loaded.settings.models_dirs == (tmp_path / "models",)


def test_a_bad_alias_is_refused_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^PORT=http: a whole number"):
        load(tmp_path, {}, {"PORT": "http"})
    with pytest.raises(ConfigError, match=r"^OVERRIDE_MEMORY_MB=lots: a size"):
        load(tmp_path, {}, {"OVERRIDE_MEMORY_MB": "lots"})


def test_aliases_stand_for_settings_that_exist() -> None:
    assert {alias.setting for alias in ALIASES} <= set(SETTINGS)


def test_the_two_ports_must_differ(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both 7000"):
        load(tmp_path, {"api_port": "7000", "grpc_port": "7000"})
    for other in ("api_port", "grpc_port"):
        with pytest.raises(ConfigError, match="--ollama-port are both 7000"):
            load(tmp_path, {other: "7000", "ollama_port": "7000"})
    load(tmp_path, {"api_port": "0", "grpc_port": "0"})


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("12GB", 12 * 10**9), ("512MiB", 512 * 2**20), ("1.5 kb", 1500), ("7", 7), ("7b", 7), ("2TiB", 2 * 2**40)],
)
def test_sizes_are_decimal_or_binary(text: str, num_bytes: int) -> None:
    assert values.size(text) == num_bytes


def test_the_documentation_has_the_table_of_all_settings() -> None:
    for name, text in settings_page.pages().items():
        assert (settings_page.FOLDER / name).read_text() == text, "run python -m tools.settings_page"


def test_the_documentation_names_the_settings_that_the_mesh_may_share() -> None:
    page = (settings_page.FOLDER / "configuration.md").read_text()
    table = page.partition("## Settings of the mesh")[2].partition("**All other settings")[0]
    named = [
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert sorted(named) == sorted(SHARED)


@pytest.mark.parametrize("off", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_the_standard_switches_of_opentelemetry_turn_the_export_off(tmp_path: Path, off: dict[str, str]) -> None:
    named = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}
    assert load(tmp_path, {}, named).settings.otlp_endpoint == "http://c:4318/v1/traces"
    assert load(tmp_path, {}, named | off).settings.otlp_endpoint == ""
    assert load(tmp_path, {"otlp_endpoint": "http://d"}, named | off).settings.otlp_endpoint == "http://d/v1/traces"


def test_another_protocol_of_opentelemetry_is_a_warning(tmp_path: Path) -> None:
    warnings = load(tmp_path, {}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}).warnings
    assert len(warnings) == 1 and "OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not used" in warnings[0]


def test_the_headers_for_a_collector_are_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("otlp_header = ['x-scope=s3cret']\n")
    assert "s3cret" not in repr(load(tmp_path).settings)
    for more in ([], ["--json"], ["--json", "--origin"]):
        assert main(["config", "show", "--home", str(tmp_path), *more]) == 0
        shown = capsys.readouterr().out
        assert "x-scope=***" in shown and "s3cret" not in shown


@pytest.mark.parametrize(("text", "limit"), [("auto", 2**63 - 1), ("off", 0), ("0", 0), ("4GB", 4_000_000_000)])
def test_the_prefix_cache_is_automatic_off_or_a_size(tmp_path: Path, text: str, limit: int) -> None:
    loaded = load(tmp_path, {"prefix_cache": text})
    assert loaded.settings.prefix_cache_bytes == limit
    assert SETTINGS["prefix_cache"].text(loaded.settings) == {"0": "off", "4GB": "4000000000"}.get(text, text)


def test_a_config_toml_without_an_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    (tmp_path / "config.toml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="has more than 1048576 bytes"):
        load(tmp_path)
