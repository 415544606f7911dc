"""Sends what a coding agent sends, turn by turn, and reads the streamed replies as the agent does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

FOLDER = Path(__file__).with_name("sequences")
Call = tuple[str, dict[str, Any]]


@dataclass
class AgentReply:
    """What an agent makes of a stream: the text, and the calls with their ids. num_prompt, num_cached: tokens of the
    prompt, and those of them that came from a cache."""

    says: str = ""
    calls: list[Call] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    end: str = ""
    num_prompt: int = 0
    num_cached: int = 0


def sequence(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


class Replay:
    """One conversation of an agent. The ids of calls in it ($CALL_1, …) are those that the replies gave.

    fields: for every request, in place of those of the sequence. is_scripted: the model writes what the sequence says;
    else its calls are made up, so that the conversation can go on.
    """

    def __init__(
        self, http: aiohttp.ClientSession, recorded: dict[str, Any], *, is_scripted: bool = True, **fields: Any
    ) -> None:
        self._http = http
        self._recorded = recorded
        self._is_scripted = is_scripted
        self._fields = fields
        self._messages: list[Any] = []
        self._ids: list[str] = []

    async def send(self, turn: dict[str, Any]) -> AgentReply:
        """Send the next request of the conversation."""
        self._messages += turn["sends"]
        place = "input" if self._recorded["path"].startswith("/v1/responses") else "messages"
        body = {**self._recorded["request"], **self._fields, place: self._messages}
        text = json.dumps(_marked(body) if self._recorded.get("marks_last_block") else body)
        for number, call_id in reversed(list(enumerate(self._ids, 1))):
            text = text.replace(f"$CALL_{number}", call_id)
        headers = {**self._recorded["headers"], "Content-Type": "application/json"}
        async with self._http.post(self._recorded["path"], data=text, headers=headers) as reply:
            answer = await reply.text()
            assert reply.status == 200, answer
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        read = {"messages": _chat, "input": _responses}[place] if "anthropic-version" not in headers else _anthropic
        found = read(events)
        self._ids += found.ids if self._is_scripted else self._made_up(turn)
        return found

    def _made_up(self, turn: dict[str, Any]) -> list[str]:
        return [f"call_{len(self._ids) + index}" for index in range(len(turn["calls"]))]


def _marked(body: dict[str, Any]) -> dict[str, Any]:
    """The body with a cache mark at its last block, where Claude Code puts it in each request."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    last = next(one for one in reversed(copy["messages"]) if isinstance(one["content"], list))
    last["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return copy


def _anthropic(events: list[dict[str, Any]]) -> AgentReply:
    found, arguments = AgentReply(), {}
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            found.ids.append(event["content_block"]["id"])
            arguments[event["index"]] = (event["content_block"]["name"], "")
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            name, so_far = arguments[event["index"]]
            arguments[event["index"]] = (name, so_far + event["delta"]["partial_json"])
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            found.says += event["delta"]["text"]
        elif event["type"] == "message_delta":
            found.end, usage = event["delta"]["stop_reason"], event["usage"]
            found.num_cached = usage["cache_read_input_tokens"]
            found.num_prompt = usage["input_tokens"] + found.num_cached
    found.calls = [(name, json.loads(text)) for name, text in arguments.values()]
    assert events[-1]["type"] == "message_stop"
    return found


def _chat(events: list[dict[str, Any]]) -> AgentReply:
    found, arguments = AgentReply(), {}
    for choice in (event["choices"][0] for event in events if event["choices"]):
        found.says += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or ():
            if "id" in call:
                found.ids.append(call["id"])
                arguments[call["index"]] = (call["function"]["name"], "")
            name, so_far = arguments[call["index"]]
            arguments[call["index"]] = (name, so_far + (call["function"].get("arguments") or ""))
        found.end = choice["finish_reason"] or found.end
    found.calls = [(name, json.loads(text)) for name, text in arguments.values()]
    usage = events[-1]["usage"]  # asked for with stream_options
    found.num_prompt, found.num_cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    return found


def _responses(events: list[dict[str, Any]]) -> AgentReply:
    found = AgentReply()
    for item in (event["item"] for event in events if event["type"] == "response.output_item.done"):
        if item["type"] == "function_call":
            found.ids.append(item["call_id"])
            found.calls.append((item["name"], json.loads(item["arguments"])))
        elif item["type"] == "message":
            found.says += "".join(part["text"] for part in item["content"])
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    found.end, usage = events[-1]["response"]["status"], events[-1]["response"]["usage"]
    found.num_prompt, found.num_cached = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return found
