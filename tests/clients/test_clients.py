"""Unmodified programs that people use against a mesh of two peers: libraries of agents and the AI SDK.

CLIENTS_PYTHON names a Python that has `pip install --no-deps -r tests/clients/requirements.txt`; AI_SDK_DIR a directory
in which `npm install ai@6 @ai-sdk/openai-compatible@2 zod@4` was run. Tests of what is missing are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.peers import MODEL

SCRIPTS = Path(__file__).with_name("scripts")
COUNTED = "7, 8, 9, 10, 11, 12"
PERSON = {"name": "Anna", "age": 7}
CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}
ANSWER = "It is 18 degrees in Paris."
LIMIT_S = 90

pytestmark = pytest.mark.extended


def python_client(name: str, url: str) -> Any:
    """What the script says that it saw."""
    if not (python := os.environ.get("CLIENTS_PYTHON")):
        pytest.skip("CLIENTS_PYTHON is not set: a Python with tests/clients/requirements.txt is needed")
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return _last_line([python, str(SCRIPTS / f"{name}_client.py"), url, MODEL], environ)


def ai_sdk(url: str) -> Any:
    if not os.environ.get("AI_SDK_DIR") or shutil.which("node") is None:
        pytest.skip("AI_SDK_DIR is not set, or there is no node: a directory with node_modules/ai is needed")
    return _last_line(["node", str(SCRIPTS / "ai_sdk_client.mjs"), url, MODEL], dict(os.environ))


def _last_line(argv: list[str], environ: dict[str, str]) -> Any:
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_litellm_chats_streams_and_calls_tools(url: str) -> None:
    seen = python_client("litellm", url)
    assert seen == {"chat": COUNTED, "streamed": COUNTED, "tool": CALL, "finish": "tool_calls"}


def test_langchain_structures_in_three_ways_and_calls_tools(url: str) -> None:
    seen = python_client("langchain", url)
    for method in ("function_calling", "json_mode", "json_schema"):
        assert seen[method]["parsed"] == PERSON, seen[method]
    assert seen["calls"] == [{"name": "get_weather", "args": {"city": "Paris"}}]
    assert seen["answer"] == ANSWER


def test_instructor_works_in_three_modes(url: str) -> None:
    assert python_client("instructor", url) == {"TOOLS": PERSON, "JSON": PERSON, "JSON_SCHEMA": PERSON}


def test_pydantic_ai_makes_its_output_type_and_calls_tools(url: str) -> None:
    seen = python_client("pydantic_ai", url)
    assert seen == {"tool": PERSON, "native": PERSON, "answer": ANSWER, "cities": ["Paris"]}


def test_llm_fills_a_schema(url: str) -> None:
    seen = python_client("llm", url)
    assert seen["code"] == 0 and json.loads(seen["made"]) == PERSON, seen


def test_the_ai_sdk_makes_text_objects_and_tool_calls(url: str) -> None:
    seen = ai_sdk(url)
    assert seen == {"chat": COUNTED, "streamed": COUNTED, "object": PERSON, "cities": ["Paris"], "answer": ANSWER}
