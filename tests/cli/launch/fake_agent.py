#!/usr/bin/env python3
"""Stands for every coding agent: reads the configuration as the agent of this file's name documents it, asks one
question in the agent's dialect, and writes what it got to the file REPORT.

The question WAIT makes it wait for a signal; EXIT 7 makes it end with that code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def value_of(flag: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1]


def claude() -> tuple[str, str, dict[str, Any]]:
    body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 9, "messages": MESSAGES}
    return f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages", os.environ["ANTHROPIC_AUTH_TOKEN"], body


def codex() -> tuple[str, str, dict[str, Any]]:
    given = dict(word.split("=", 1) for flag, word in zip(sys.argv, sys.argv[1:], strict=False) if flag == "-c")
    provider = f"model_providers.{json.loads(given['model_provider'])}"
    key = os.environ[json.loads(given[f"{provider}.env_key"])]
    assert json.loads(given[f"{provider}.wire_api"]) == "responses"
    body = {"model": json.loads(given["model"]), "max_output_tokens": 16, "input": MESSAGES}
    return f"{json.loads(given[f'{provider}.base_url'])}/responses", key, body


def opencode() -> tuple[str, str, dict[str, Any]]:
    config = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])
    name, _, model = config["model"].partition("/")
    options = config["provider"][name]["options"]
    assert model in config["provider"][name]["models"]
    return chat(options["baseURL"], options["apiKey"], model)


def aider() -> tuple[str, str, dict[str, Any]]:
    given = dict(line.split("=", 1) for line in Path(value_of("--env-file")).read_text().splitlines())
    assert json.loads(Path(value_of("--model-metadata-file")).read_text())[given["AIDER_MODEL"]]["max_input_tokens"]
    return chat(given["OPENAI_API_BASE"], given["OPENAI_API_KEY"], given["AIDER_MODEL"].removeprefix("openai/"))


def qwen() -> tuple[str, str, dict[str, Any]]:
    assert value_of("--auth-type") == "openai"
    return chat(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], value_of("--model"))


def cn() -> tuple[str, str, dict[str, Any]]:
    (model,) = json.loads(Path(value_of("--config")).read_text())["models"]
    return chat(model["apiBase"], model["apiKey"], model["model"])


def goose() -> tuple[str, str, dict[str, Any]]:
    url = f"{os.environ['OPENAI_HOST']}/{os.environ['OPENAI_BASE_PATH']}".removesuffix("/chat/completions")
    return chat(url, os.environ["OPENAI_API_KEY"], os.environ["GOOSE_MODEL"])


def crush() -> tuple[str, str, dict[str, Any]]:
    config = json.loads((Path(os.environ["CRUSH_GLOBAL_CONFIG"]) / "crush.json").read_text())
    chosen = config["models"]["large"]
    provider = config["providers"][chosen["provider"]]
    return chat(provider["base_url"], provider["api_key"], chosen["model"])


def chat(base: str, key: str, model: str) -> tuple[str, str, dict[str, Any]]:
    return f"{base}/chat/completions", key, {"model": model, "max_tokens": 9, "messages": MESSAGES}


MESSAGES = [{"role": "user", "content": sys.argv[-1]}]
url, key, body = globals()[Path(sys.argv[0]).name]()
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
try:
    with urllib.request.urlopen(request, timeout=30) as reply:
        status = reply.status
except urllib.error.HTTPError as error:
    status = error.code
report = {"status": status, "key": key, "argv": sys.argv[1:], "environ": dict(os.environ), "tty": os.isatty(0)}
Path(os.environ["REPORT"] + ".new").write_text(json.dumps(report))
os.rename(os.environ["REPORT"] + ".new", os.environ["REPORT"])
if sys.argv[-1] == "WAIT":
    signal.pause()
sys.exit(int(sys.argv[-1].removeprefix("EXIT ")) if sys.argv[-1].startswith("EXIT ") else 0)
