"""Anthropic's own clients for Python and Node, unmodified, against a mesh of two peers.

CLIENTS_PYTHON names a Python that has `pip install --no-deps -r tests/clients/requirements.txt`; ANTHROPIC_NODE_DIR a
directory in which `npm install @anthropic-ai/sdk@1` was run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

import pytest

from tests.clients.test_clients import ANSWER, COUNTED, LIMIT_S, PERSON, SCRIPTS, python_client
from tests.support.peers import MODEL

pytestmark = pytest.mark.extended

CALL = ["get_weather", {"city": "Paris"}, "tool_use"]
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
EVENTS = ["message_start", *BLOCK, "message_delta", "message_stop"]


@pytest.fixture(scope="module")
def seen_by_python(url: str, versions: str) -> dict[str, Any]:
    seen: dict[str, Any] = python_client("anthropic", url, versions)
    return seen


@pytest.fixture(scope="module")
def seen_by_node(url: str) -> dict[str, Any]:
    if not os.environ.get("ANTHROPIC_NODE_DIR") or shutil.which("node") is None:
        pytest.skip("ANTHROPIC_NODE_DIR is not set, or there is no node: node_modules/@anthropic-ai/sdk is needed")
    argv = ["node", str(SCRIPTS / "anthropic_client.mjs"), url, MODEL]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_replies_have_no_field_that_the_types_of_the_package_do_not_know(seen_by_python: dict[str, Any]) -> None:
    assert seen_by_python["unknown"] == []


def test_python_gets_messages_whole_and_streamed(seen_by_python: dict[str, Any]) -> None:
    assert seen_by_python["chat"] == [COUNTED, "end_turn"]
    assert seen_by_python["streamed"] == [COUNTED, True]
    events = seen_by_python["events"]
    inner = [event for event in events if event != "content_block_delta"]
    assert inner == [event for event in EVENTS if event != "content_block_delta"] and len(events) > 7
    assert seen_by_python["stopped"] == ["7, 8, 9, ", "stop_sequence", "10"]
    assert seen_by_python["beta"] == COUNTED
    assert seen_by_python["prefilled"] == COUNTED.removeprefix("7, 8")


def test_python_calls_a_tool_and_gets_the_answer(seen_by_python: dict[str, Any]) -> None:
    assert seen_by_python["call"] == CALL
    assert seen_by_python["call events"] == sorted(EVENTS)
    assert seen_by_python["answer"] == ANSWER


def test_the_tool_runner_of_python_continues_its_thread(seen_by_python: dict[str, Any]) -> None:
    assert seen_by_python["runner"] == [ANSWER, ["create", "continue"]]


def test_python_gets_objects_and_thinking(seen_by_python: dict[str, Any]) -> None:
    assert seen_by_python["parsed"] == PERSON
    assert seen_by_python["thinking"][0] == "thinking"


def test_python_counts_tokens_and_lists_models(seen_by_python: dict[str, Any]) -> None:
    assert seen_by_python["counted"] and seen_by_python["models"]
    assert seen_by_python["model"] == MODEL


def test_python_raises_its_own_errors(seen_by_python: dict[str, Any]) -> None:
    assert seen_by_python["errors"] == {
        "image": ["BadRequestError", "invalid_request_error", True],
        "model": ["NotFoundError", "not_found_error", True],
    }


def test_node_chats_streams_calls_tools_thinks_and_counts(seen_by_node: dict[str, Any]) -> None:
    assert seen_by_node["thinking"].pop(0) == "thinking"
    assert seen_by_node == {
        "chat": [COUNTED, "end_turn"],
        "streamed": [COUNTED, True],
        "events": EVENTS,
        "call": CALL,
        "answer": ANSWER,
        "thinking": seen_by_node["thinking"],
        "counted": True,
        "error": ["NotFoundError", "not_found_error", True],
        "models": True,
    }
