"""Unmodified clients of OpenAI's Responses API against a mesh of two peers.

CLIENTS_PYTHON names a Python that has `pip install --no-deps -r tests/clients/requirements.txt`; OPENAI_NODE_DIR a
directory in which `npm install openai@7` was run; AI_SDK_DIR one with `npm install ai@6 @ai-sdk/openai@3 zod@4`.
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

CALL = ["get_weather", {"city": "Paris"}]
QUESTION = "What is the weather in Paris?"
BEGIN = ["created", "in_progress", "output_item.added", "content_part.added"]
END = ["output_text.done", "content_part.done", "output_item.done", "completed"]


def node_client(script: str, packages: str, url: str) -> dict[str, Any]:
    """What a program for node says that it saw. packages: the variable that names the directory of its packages."""
    if not os.environ.get(packages) or shutil.which("node") is None:
        pytest.skip(f"{packages} is not set, or there is no node: a directory with node_modules is needed")
    argv = ["node", str(SCRIPTS / script), url, MODEL]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.fixture(scope="module")
def seen_by_python(url: str, versions: str) -> dict[str, Any]:
    seen: dict[str, Any] = python_client("responses", url, versions)
    return seen


def test_responses_have_no_field_that_the_types_of_the_package_do_not_know(seen_by_python: dict[str, Any]) -> None:
    # the types of openai 3.3 want the name of the function with the end of its arguments, those of 3.57 have none
    assert set(seen_by_python["unknown"]) - {"name"} == {"store"}, "the API documents this one"


def test_python_gets_responses_whole_and_streamed(seen_by_python: dict[str, Any]) -> None:
    assert seen_by_python["chat"] == [COUNTED, "completed"]
    assert seen_by_python["streamed"] == [COUNTED, True]
    events = seen_by_python["events"]
    assert [event for event in events if event != "output_text.delta"] == [*BEGIN, *END] and len(events) > 12
    assert seen_by_python["cut"] == ["incomplete", "max_output_tokens"]
    assert seen_by_python["logprobs"] == COUNTED


def test_python_calls_a_tool_and_answers_from_the_stored_conversation_or_its_own(
    seen_by_python: dict[str, Any],
) -> None:
    assert seen_by_python["call"] == [*CALL, "completed"]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert seen_by_python["call events"] == sorted([*arguments, *BEGIN[:3], *END[2:]])
    for way in ("stored answer", "referred answer", "sent answer"):
        assert seen_by_python[way] == ANSWER, way


def test_python_gets_objects_and_reasoning(seen_by_python: dict[str, Any]) -> None:
    assert seen_by_python["parsed"] == PERSON
    assert seen_by_python["reasoning"] == ["reasoning", True, True] and seen_by_python["summary"] is True
    assert {"reasoning_text.delta", "reasoning_text.done"} <= set(seen_by_python["reasoning events"])
    assert seen_by_python["streamed reasoning"] == "reasoning"


def test_python_reads_lists_counts_and_deletes_responses(seen_by_python: dict[str, Any]) -> None:
    assert seen_by_python["read"] is True and seen_by_python["read again"] == [5, COUNTED]
    assert seen_by_python["items"] == [["message", QUESTION]]
    assert seen_by_python["counted"] is True and seen_by_python["deleted"] is None
    assert seen_by_python["errors"] == {
        "deleted": ["NotFoundError", "previous_response_id", "response_not_found"],
        "background": ["BadRequestError", "background", "invalid_request"],
        "search": ["BadRequestError", "tools[0].type", "invalid_request"],
        "model": ["NotFoundError", "model", "model_not_found"],
    }


def test_node_gets_responses_streams_tools_and_stored_conversations(url: str) -> None:
    assert node_client("responses_client.mjs", "OPENAI_NODE_DIR", url) == {
        "chat": [COUNTED, "completed"],
        "events": [*BEGIN, "output_text.delta", *END],
        "streamed": [COUNTED, COUNTED, True],
        "call": CALL,
        "answer": ANSWER,
        "reasoning": ["reasoning", True],
        "read": COUNTED,
        "items": [QUESTION],
        "error": ["NotFoundError", "response_not_found"],
    }


def test_the_default_provider_of_the_ai_sdk_makes_text_objects_thoughts_and_tool_calls(url: str) -> None:
    assert node_client("ai_sdk_default_client.mjs", "AI_SDK_DIR", url) == {
        "chat": COUNTED,
        "streamed": COUNTED,
        "object": PERSON,
        "cities": ["Paris"] * 3,
        "texts": [ANSWER] * 3,
        "thought": True,
    }


def test_langchain_uses_responses_stored_or_sent(url: str, versions: str) -> None:
    assert python_client("langchain_responses", url, versions) == {
        "chat": COUNTED,
        "streamed": COUNTED,
        "parsed": PERSON,
        "sent": [[CALL[1]], ANSWER],
        "stored": [[CALL[1]], ANSWER],
        "reasoning": "reasoning",
    }


def test_pydantic_ai_uses_responses(url: str, versions: str) -> None:
    assert python_client("pydantic_ai_responses", url, versions) == {
        "answer": ANSWER,
        "typed": PERSON,
        "thought": ["thinking", "text"],
        "counted": [COUNTED, "3, 4, 5"],
    }


def test_litellm_completes_responds_and_writes_messages(url: str) -> None:
    assert python_client("litellm_routes", url) == {
        "completion": ["length", 5],
        "response": COUNTED,
        "streamed": COUNTED,
        "last event": "response.completed",
        "call": CALL,
        "answer": ANSWER,
        "message": COUNTED,
    }
