"""Unmodified programs that people use against a mesh of two peers: libraries of agents and the AI SDK.

CLIENTS_PYTHON names a Python that has `pip install --no-deps -r tests/clients/requirements.txt`, NEWEST_CLIENTS_PYTHON
one that has the newest versions of most of these, in tests/clients/newest.txt; AI_SDK_DIR a directory in which `npm
install ai@6 @ai-sdk/openai-compatible@2 @ai-sdk/openai@3 zod@4` was run; NEWEST_AI_SDK_DIR one of ai@7
@ai-sdk/openai-compatible@3 @ai-sdk/openai@4; OPENAI_NODE_DIR and ANTHROPIC_NODE_DIR those of openai@7 and
@anthropic-ai/sdk@1. Tests of what is missing are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.peers import MODEL

SCRIPTS = Path(__file__).with_name("scripts")
EXAMPLES = Path(__file__).parents[2] / "examples" / "clients"
COUNTED = "7, 8, 9, 10, 11, 12"
PERSON = {"name": "Anna", "age": 7}
CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}
ANSWER = "It is 18 degrees in Paris."
LIMIT_S = 90
NODE_PACKAGES = {"ask_openai.mjs": "OPENAI_NODE_DIR", "ask_anthropic.mjs": "ANTHROPIC_NODE_DIR"}

pytestmark = pytest.mark.extended


PYTHONS = {"CLIENTS_PYTHON": "requirements.txt", "NEWEST_CLIENTS_PYTHON": "newest.txt"}
"""Variables that name a Python, and the file of the packages that it has."""


def clients_python(variable: str = "CLIENTS_PYTHON") -> str:
    """A Python with the clients' packages."""
    if not (python := os.environ.get(variable)):
        pytest.skip(f"{variable} is not set: a Python with tests/clients/{PYTHONS[variable]} is needed")
    return python


def environ_of(python: str) -> dict[str, str]:
    """Without our own modules; the programs of that Python come first."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**kept, "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}


def python_client(name: str, url: str, variable: str = "CLIENTS_PYTHON") -> Any:
    """What the script says that it saw."""
    python = clients_python(variable)
    return _last_line([python, str(SCRIPTS / f"{name}_client.py"), url, MODEL], environ_of(python))


def example(name: str, url: str, folder: Path, model: str = MODEL) -> str:
    """What an example of a client prints, without the white space around it."""
    program = EXAMPLES / name
    if program.suffix == ".mjs":
        packages = NODE_PACKAGES.get(name, "AI_SDK_DIR")
        if not os.environ.get(packages) or shutil.which("node") is None:
            pytest.skip(f"{packages} is not set, or there is no node: a directory with node_modules is needed")
        (folder / "node_modules").symlink_to(Path(os.environ[packages]).resolve() / "node_modules")
        copied = shutil.copy(program, folder)  # node looks for packages beside the program
        return _printed(["node", str(copied), url, model], dict(os.environ)).strip()
    if name == "ask_curl.sh":
        return _printed(["sh", str(program), url, model], dict(os.environ)).strip()
    python = sys.executable if name == "ask_openai.py" else clients_python()
    runner = "sh" if program.suffix == ".sh" else python
    return _printed([runner, str(program), url, model], environ_of(python)).strip()


def ai_sdk(url: str, variable: str) -> Any:
    if not os.environ.get(variable) or shutil.which("node") is None:
        pytest.skip(f"{variable} is not set, or there is no node: a directory with node_modules/ai is needed")
    environ = {**os.environ, "AI_SDK_DIR": os.environ[variable]}
    return _last_line(["node", str(SCRIPTS / "ai_sdk_client.mjs"), url, MODEL], environ)


def _last_line(argv: list[str], environ: dict[str, str]) -> Any:
    return json.loads(_printed(argv, environ).splitlines()[-1])


def _printed(argv: list[str], environ: dict[str, str]) -> str:
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "ask_openai.py",
        "ask_responses.py",
        "ask_openai.mjs",
        "ask_litellm.py",
        "ask_anthropic.py",
        "ask_anthropic.mjs",
        "ask_ollama.py",
    ],
)
def test_the_examples_that_stream_print_the_whole_answer(name: str, url: str, tmp_path: Path) -> None:
    assert example(name, url, tmp_path) == COUNTED


def test_the_example_of_curl_prints_the_whole_answer_as_json(url: str, tmp_path: Path) -> None:
    assert json.loads(example("ask_curl.sh", url, tmp_path))["choices"][0]["message"]["content"] == COUNTED


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("ask_langchain.py", ANSWER),
        ("ask_instructor.py", "name='Anna' age=7"),
        ("ask_pydantic_ai.py", "name='Anna' age=7"),
        ("ask_ai_sdk.mjs", "{ name: 'Anna', age: 7 }"),
    ],
)
def test_the_examples_with_tools_and_types_print_their_result(
    name: str, printed: str, url: str, tmp_path: Path
) -> None:
    assert example(name, url, tmp_path) == printed


def test_the_example_of_llm_prints_what_the_schema_asks_for(url: str, tmp_path: Path) -> None:
    assert json.loads(example("ask_llm.sh", url, tmp_path)) == PERSON


def test_litellm_chats_streams_and_calls_tools(url: str) -> None:
    seen = python_client("litellm", url)
    counted = dict.fromkeys(("chat", "streamed", "anthropic", "ollama"), COUNTED)
    assert seen == {**counted, "tool": CALL, "finish": "tool_calls"}


def test_langchain_structures_in_three_ways_and_calls_tools(url: str, versions: str) -> None:
    seen = python_client("langchain", url, versions)
    for method in ("function_calling", "json_mode", "json_schema"):
        assert seen[method]["parsed"] == PERSON, seen[method]
    assert seen["calls"] == [{"name": "get_weather", "args": {"city": "Paris"}}]
    assert seen["answer"] == ANSWER


def test_instructor_works_in_three_modes(url: str) -> None:
    assert python_client("instructor", url) == {"TOOLS": PERSON, "JSON": PERSON, "JSON_SCHEMA": PERSON}


def test_pydantic_ai_makes_its_output_type_and_calls_tools(url: str, versions: str) -> None:
    seen = python_client("pydantic_ai", url, versions)
    assert seen == {"tool": PERSON, "native": PERSON, "answer": ANSWER, "cities": ["Paris"]}


def test_llm_fills_a_schema(url: str, versions: str) -> None:
    seen = python_client("llm", url, versions)
    assert seen["code"] == 0 and json.loads(seen["made"]) == PERSON, seen


@pytest.mark.parametrize("variable", ["AI_SDK_DIR", "NEWEST_AI_SDK_DIR"])
def test_the_ai_sdk_makes_text_objects_and_tool_calls(url: str, variable: str) -> None:
    seen = ai_sdk(url, variable)
    assert seen == {"chat": COUNTED, "streamed": COUNTED, "object": PERSON, "cities": ["Paris"], "answer": ANSWER}
