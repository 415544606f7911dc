"""Flags and variables that users of exo, Skulk, mlx.launch and llama-server know: each works, or says what does."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.main import main
from exo_mesh.cli.parser import Parser, add_node_flags
from exo_mesh.cli.verbs.run import add_arguments as add_run_arguments
from exo_mesh.settings.aliases import ALIASES
from exo_mesh.settings.config import ConfigError
from exo_mesh.settings.foreign import ASKING_FLAGS, FLAGS, KEYS, RENAMED, VARIABLES
from exo_mesh.settings.loading import load_settings
from exo_mesh.settings.table import SETTINGS

ROOT = Path(__file__).resolve().parents[2]

WORK = (
    "--node-host=127.0.0.1", "--node-port=5001", "--listen-port=5678", "--broadcast-port=5678", "--discovery=udp",
    "--discovery-timeout=3", "--discovery-config-path=peers.json", "--wait-for-peers=1", "--api-port=52415",
    "--engine=numpy", "--default-model=m", "--default-temp=0.5", "--max-generate-tokens=5", "--response-timeout=4",
    "--system-prompt=text", "--tailnet-name=t", "--no-api", "--fast-synch", "--no-fast-synch", "--offline",
    "--bootstrap-peers=a:1", "--port=52415", "--hostfile=hosts.json", "-v", "-vv", "-vvv", "-q", "--no-batch",
    "--max-batch-size=4", "--proportional-layers", "--no-proportional-layers",
)  # fmt: skip
HINTED = (
    "--node-id", "--max-parallel-downloads", "--models-seed-dir", "--tailscale-api-key", "--disable-tui",
    "--force-master", "-m", "--libp2p-port", "--subprocess", "--model", "--backend", "--env", "-n", "--spec-type",
    "--spec-draft-n-max", "--model-draft", "--no-worker", "--no-downloads",
)  # fmt: skip
OTHER_VARIABLES = (
    "SKULK_PIPELINE_EVAL_TIMEOUT_SECONDS", "SKULK_GROUP_CONNECT_DEADLINE_SECONDS", "SKULK_WARMUP_DEADLINE_SECONDS",
    "SKULK_MLX_HANG_DEBUG", "SKULK_MLX_HANG_DEBUG_INTERVAL_SECONDS", "SKULK_NO_BATCH", "SKULK_KV_CACHE_BACKEND",
    "SKULK_LIBP2P_NAMESPACE", "EXO_LIBP2P_NAMESPACE", "SKULK_LLAMA_CPP_BACKENDS", "SKULK_LLAMA_SERVER_BIN",
    "SKULK_ZENOH_LISTEN", "SKULK_ZENOH_CONNECT", "SKULK_DATA_REORDER_BUFFER", "SKULK_SKIP_LLM_WARMUP",
    "SKULK_EVENT_LOG_DIR", "RUNNER_MODE",
    "RDMA_DEVICES", "SKULK_OFFLINE", "SKULK_HEADLESS", "SKULK_MODELS_DIR", "SKULK_FAST_SYNCH", "SKULK_HOME", "EXO_HOME",
    "SKULK_CUSTOM_MODEL_CARDS_DIR",
    "SKULK_LLAMA_CPP_LOGITS_ALL", "SKULK_LLAMA_CPP_LOGITS_ALL_N_CTX", "SKULK_LLAMA_CPP_FLASH_ATTN",
    "SKULK_LLAMA_SERVER_BACKENDS", "SKULK_LLAMA_SERVER_FORCE_NO_SPEC", "EXO_MESH_LLAMA_CPP_BACKENDS",
    "EXO_MESH_LLAMA_CPP_LOGITS_ALL", "EXO_MESH_LLAMA_CPP_LOGITS_ALL_N_CTX", "EXO_MESH_LLAMA_CPP_FLASH_ATTN",
    "EXO_MESH_LLAMA_SERVER_BACKENDS", "EXO_MESH_LLAMA_SERVER_FORCE_NO_SPEC",
)  # fmt: skip
ALIASED = (
    "MODEL_DIR", "MODEL_ID", "HOST", "PORT", "CTRL_HOST", "CTRL_PORT", "QUEUE_MAX", "MAX_QUEUE_DEPTH", "REQ_TIMEOUT",
    "REQUEST_TIMEOUT_S", "MAX_TOKENS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "OVERRIDE_MEMORY_MB", "DEBUG",
    "MEMORY_POLL_INTERVAL", "MEMORY_THRESHOLD", "REQUEST_LOG_PATH", "REQUEST_LOG_MAX", "PROPORTIONAL_LAYERS",
    "RKLLM_SERVER_HOST", "RKLLM_SERVER_PORT",
)  # fmt: skip


def node_parser() -> Parser:
    parser = Parser(prog="exo-mesh serve")
    add_node_flags(parser)
    return parser


@pytest.mark.parametrize("flag", WORK)
def test_a_flag_of_other_programs_works(flag: str) -> None:
    node_parser().parse_all([flag])


@pytest.mark.parametrize("flag", sorted({*HINTED, *FLAGS}))
def test_a_flag_that_has_no_counterpart_is_refused_with_what_to_do(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        node_parser().parse_all([flag, "value"])
    assert str(caught.value) == FLAGS[flag]


@pytest.mark.parametrize("flag", sorted(ASKING_FLAGS))
def test_a_flag_with_which_other_programs_ask_is_refused_with_what_to_do(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "m", flag, "x"]) == exit_codes.USAGE
    assert capsys.readouterr().err == f"exo-mesh: {ASKING_FLAGS[flag]}\n"


@pytest.mark.parametrize("verb", ["load", "show", "pull", "rm", "preview"])
def test_a_model_that_is_given_as_a_flag_is_asked_for_without_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-m", "--model=x"):
        assert main([verb, flag, "x"]) == exit_codes.USAGE
        assert capsys.readouterr().err == f"exo-mesh: the model needs no flag: exo-mesh {verb} MODEL\n"


def test_a_verb_that_starts_no_node_gives_no_hint_about_flags_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "-n", "3"]) == exit_codes.USAGE
    assert capsys.readouterr().err == "exo-mesh: unknown flag -n; see exo-mesh ps --help\n"


def test_a_verb_that_has_such_a_flag_keeps_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engines", "--model", "/nowhere", "--engines", "numpy"]) == 1
    assert FLAGS["--model"] not in capsys.readouterr().err


@pytest.mark.parametrize("name", OTHER_VARIABLES)
def test_a_variable_of_other_programs_is_a_warning_that_says_what_to_use(name: str, tmp_path: Path) -> None:
    (warning,) = load_settings({}, {"EXO_MESH_HOME": str(tmp_path), name: "1"}).warnings
    assert warning.startswith(f"{name} is set but not used: ")


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_section_of_other_programs_is_refused_with_the_file_and_what_to_use(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f"[{key}]\nenabled = true\n")
    with pytest.raises(ConfigError) as caught:
        load_settings({"home": [str(tmp_path)]}, {})
    assert str(caught.value) == f'{tmp_path / "config.toml"}: no setting "{key}": {KEYS[key]}'


def test_the_keys_that_stand_for_sections_exist() -> None:
    words = {
        "log_format",
        "log_level",
        "trace_retention_days",
        "trace_sample",
        "tensor_group",
        "group_backend",
        "hostfile",
    }
    assert words <= {*SETTINGS} and all(any(word in hint for hint in KEYS.values()) for word in words)


def test_other_variables_that_only_begin_like_theirs_are_nobodys_business(tmp_path: Path) -> None:
    environ = {"EXO_MESH_HOME": str(tmp_path), "EXO_COLOUR": "red", "SKULK_OFFLINE": ""}
    assert load_settings({}, environ).warnings == ()


def test_every_hint_names_flags_and_variables_that_exist() -> None:
    known = {setting.flag for setting in SETTINGS.values()}
    variables = {setting.variable for setting in SETTINGS.values()}
    run = Parser(prog="exo-mesh run")
    add_run_arguments(run)
    known |= set(run._option_string_actions)
    for hint in (*FLAGS.values(), *VARIABLES.values(), *ASKING_FLAGS.values()):
        words = {word.strip(",:;`.") for word in hint.split()}
        assert {word for word in words if word.startswith("--")} <= known, hint
        assert {word for word in words if word.startswith("EXO_MESH_")} <= variables, hint


def test_the_older_names_of_settings_are_read() -> None:
    assert {alias.variable for alias in ALIASES} >= set(ALIASED)


def test_no_variable_that_is_read_counts_as_one_that_changes_nothing() -> None:
    assert VARIABLES.keys().isdisjoint({alias.variable for alias in ALIASES})


def test_every_such_name_stands_in_the_documentation() -> None:
    table = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert all(f"| `{flag}` | {hint} |" in table for flag, hint in ASKING_FLAGS.items())
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert all(f"`{name}`" in page for name in (*FLAGS, *RENAMED))
    assert all(f"`{name}`" in page for name in VARIABLES if not name.endswith(tuple(RENAMED)))


def test_the_prompt_may_be_a_flag_and_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m", "hello", "--prompt", "again"]) == 1
    assert "the prompt is given twice" in capsys.readouterr().err
    assert main(["run", "m", "--prompt", "hello", "--api-url", "http://127.0.0.1:9"]) == 3
