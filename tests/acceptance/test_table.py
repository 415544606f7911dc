"""docs/how-it-works/acceptance.md has every test name of an older plan, and the tests that it points to exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-it-works" / "acceptance.md").read_text()

NAMES = re.findall(
    r"\w+",
    """
    test_config_distributed_defaults test_command_encode_decode_roundtrip test_command_insert_with_tokens
    test_command_encode_decode_all_types test_sharded_main_arg_parsing test_create_hostfile
    test_validate_env_no_distributed test_rank_local_cache_dir test_worker_insert_step_remove
    test_broadcast_insert_command test_broadcast_remove_command test_broadcast_step_command test_buffer_overflow_raises
    test_scheduler_distributed_broadcasts test_scheduler_single_node_unchanged test_sampler_param_encoding
    test_sampler_roundtrip_precision test_kv_cache_sharded_dimensions test_block_hash_same_across_ranks
    test_ssd_cache_rank_isolation test_ssd_cache_rank_dir_creation test_leader_startup_sequence
    test_worker_shutdown_on_command test_worker_receives_insert_and_steps test_worker_receives_remove
    test_worker_receives_shutdown test_scheduler_broadcasts_insert_before_step
    test_scheduler_broadcasts_remove_on_cancel test_scheduler_broadcasts_shutdown_on_stop
    test_kv_cache_sharded_head_count test_block_hash_invariant_across_ranks
    test_full_request_lifecycle_mock_distributed
    """,
)
FILES = [
    "tests/test_distributed.py",
    "tests/test_kv_cache_manager.py",
    "tests/test_ssd_cache.py",
    "tests/test_adversarial.py",
    "scripts/test_distributed_2node.py",
    "scripts/benchmark_distributed.py",
]
"""All that the plan for tensor-parallel serving names."""

CURL_LINES = "tests/acceptance/test_curl_lines.py"
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
NOT_YET = re.compile(r"not yet: (?:S[0-4]|CARD)-\d+")


def rows(heading: str) -> list[list[str]]:
    """The cells of each row of the table under a heading, without the two lines of its head."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


ROWS = [*rows("Named tests"), *rows("Named files"), *rows("Lines of curl and jq")]


@functools.cache
def names_in(path: str) -> frozenset[str]:
    """Names of the test functions in a file; read, not run."""
    tree = ast.parse((ROOT / path).read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


def test_every_name_of_the_plan_has_one_row() -> None:
    named = [name for row in rows("Named tests") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(NAMES)
    assert sorted(row[0].strip("`") for row in rows("Named files")) == sorted(FILES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:2])[:60])
def test_each_row_leads_to_tests_that_exist_or_says_what_is_missing(row: list[str]) -> None:
    # what the plan calls its own test or file stands in the first cell
    found = REFERENCE.findall(" ".join(row[1:]))
    for path, name in found:
        assert (ROOT / path).is_file(), path
        assert not name or name in names_in(path), f"{path} has no test {name}"
        assert names_in(path), f"{path} has no test"
    assert found or NOT_YET.search(" ".join(row)), "this row points to nothing"


def test_every_line_that_is_run_is_in_the_table() -> None:
    references = [reference for row in rows("Lines of curl and jq") for reference in REFERENCE.findall(row[2])]
    assert {name for path, name in references if path == CURL_LINES} == names_in(CURL_LINES)
