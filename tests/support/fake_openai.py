"""An OpenAI-style model server without a model: `python -m tests.support.fake_openai --port N --kind vllm`.

The answer to a prompt is an endless text that depends on the prompt only, so that a continued answer can be compared
with a whole one. Words in the last message ask for more: "think" for reasoning before the text, "call" for two tool
calls in its place, "short" for an end after three tokens. A switch makes the server misbehave in one way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientConnectionResetError, web

KINDS = ("llama-server", "vllm", "sglang", "ollama", "lm-studio", "other")
OWNED_BY = {"llama-server": "llamacpp", "vllm": "vllm", "sglang": "sglang", "ollama": "library"}

SWITCHES = {
    "cut", "error-event", "error-field", "garbage", "huge-line", "ignores-limit", "json", "loading", "needs-key",
    "no-done", "no-finish", "no-prefill", "no-such-path", "no-usage", "noise", "pings", "redirect", "silent", "stall",
    "stall-first", "two-halves",
}  # fmt: skip

KEY = "k" * 40
MODEL = "fake-model"
CONTEXT = 2048
TOKEN_S = 0.006
FAULT_AFTER = 3
"""Tokens before the fault of a switch that spoils the middle of an answer."""

MOST_KEPT = 100
MODELS = object()
PROMPT_CHARACTERS = len("Once upon a time")


def text_token(prompt: str, index: int) -> str:
    """Token number `index` of the endless text after a prompt; tokens have different lengths."""
    digest = hashlib.sha256(f"{prompt}|{index}".encode()).hexdigest()
    return digest[: 2 + int(digest[0], 16) % 4] + " "


def text_after(prompt: str, begun: str, index: int) -> str:
    """Token number `index` after a beginning, which may end within a token."""
    position, skipped = 0, 0
    while position < len(begun):
        position += len(text_token(prompt, skipped))
        skipped += 1
    if position > len(begun):
        left = text_token(prompt, skipped - 1)[-(position - len(begun)) :]
        return left if index == 0 else text_token(prompt, skipped + index - 1)
    return text_token(prompt, skipped + index)


@dataclass
class FakeModelServer:
    """The state of one fake. failure: (status, body, headers) of all answers, instead of an answer. listed: the reply
    to /v1/models, instead of a list of `models`."""

    kind: str = "other"
    switches: frozenset[str] = frozenset()
    models: Sequence[str] = (MODEL,)
    token_s: float = TOKEN_S
    failure: tuple[int, Any, Mapping[str, str]] | None = None
    listed: Any = MODELS
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    num_running: int = 0
    num_aborted: int = 0
    num_shown: int = 0

    def __post_init__(self) -> None:
        assert self.kind in KINDS and self.switches <= SWITCHES, (self.kind, self.switches - SWITCHES)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/fake/state", self._state),
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._answer),
                web.post("/v1/completions", self._answer),
                *self._own_routes(),
            ]
        )
        return app

    def _own_routes(self) -> list[web.RouteDef]:
        if self.kind == "llama-server":
            return [
                web.get("/props", self._props),
                web.post("/apply-template", self._apply_template),
                web.post("/tokenize", self._tokenize),
            ]
        if self.kind == "vllm":
            return [web.post("/tokenize", self._tokenize)]
        if self.kind == "ollama":
            return [
                web.get("/api/version", self._version),
                web.get("/api/ps", self._running),
                web.post("/api/show", self._show),
            ]
        return [web.get("/api/v0/models", self._studio_models)] if self.kind == "lm-studio" else []

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if "needs-key" in self.switches and request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "Invalid API Key", "code": 401}}, status=401)
        if "silent" in self.switches:
            await asyncio.sleep(3600)
        if "redirect" in self.switches:
            return web.Response(status=307, headers={"Location": "http://127.0.0.1:9/elsewhere"})
        if "no-such-path" in self.switches:
            return web.json_response({"error": f"Unexpected endpoint: {request.path}"}, status=200)
        if "loading" in self.switches and self.kind == "llama-server" and request.path != "/v1/models":
            return web.json_response({"error": {"code": 503, "message": "Loading model"}}, status=503)
        return await handler(request)

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response({"running": self.num_running, "aborted": self.num_aborted})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        if self.listed is not MODELS:
            return web.json_response(self.listed)
        more: dict[str, Any] = {
            "llama-server": {"meta": {"n_ctx_train": 4 * CONTEXT}},
            "vllm": {"max_model_len": CONTEXT},
            "sglang": {"max_model_len": CONTEXT},
        }.get(self.kind, {})
        owner = OWNED_BY.get(self.kind, "organization_owner")
        data = [{"id": name, "object": "model", "created": 1, "owned_by": owner, **more} for name in self.models]
        return web.json_response({"object": "list", "data": data})

    async def _props(self, request: web.Request) -> web.Response:
        return web.json_response({"default_generation_settings": {"n_ctx": CONTEXT}, "total_slots": 3})

    async def _apply_template(self, request: web.Request) -> web.Response:
        """As a llama-server of 2026 with a template that does not think; "no-prefill": one that does, before May."""
        body = await request.json()
        if "no-prefill" in self.switches:
            return self._refuse("Assistant response prefill is incompatible with enable_thinking.")
        last = body["messages"][-1]
        return web.json_response({"prompt": f"<user>{last.get('reasoning_content', '')}{last['content']}"})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """Each token of its texts ends with a space."""
        body = await request.json()
        text = body["content" if self.kind == "llama-server" else "prompt"]
        tokens = [*range(text.count(" ") + bool(text and not text.endswith(" ")))]
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.12.0"})

    async def _running(self, request: web.Request) -> web.Response:
        return web.json_response({"models": [{"name": "loaded:8b", "context_length": 16384}]})

    async def _show(self, request: web.Request) -> web.Response:
        name = (await request.json())["model"]
        self.num_shown += 1
        reply: dict[str, Any] = {
            "capabilities": ["completion", "tools"],
            "model_info": {"llama.context_length": 131072},
        }
        if name == "chosen:8b":
            reply["parameters"] = 'stop "<|end|>"\nnum_ctx 8192'
        if name == "embedder":
            reply["capabilities"] = ["embedding"]
        return web.json_response(reply)

    async def _studio_models(self, request: web.Request) -> web.Response:
        details = [{"id": name, "type": "llm", "max_context_length": 32768} for name in self.models]
        for detail in details:
            if detail["id"] == "loaded":
                detail["loaded_context_length"] = 4096
            if detail["id"] == "embedder":
                detail["type"] = "embeddings"
        return web.json_response({"data": details})

    def _refuse(self, message: str) -> web.Response:
        return web.json_response(
            {"error": {"code": 400, "message": message, "type": "invalid_request_error"}}, status=400
        )

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests = [*self.requests, (request.path, body)][-MOST_KEPT:]
        self.headers = [*self.headers, dict(request.headers)][-MOST_KEPT:]
        if self.failure is not None:
            status, value, headers = self.failure
            text = value if isinstance(value, str) else json.dumps(value)
            return web.Response(status=status, text=text, headers=dict(headers))
        if body["model"] not in self.models:
            return web.json_response({"error": {"message": f"The model `{body['model']}` does not exist"}}, status=404)
        if "no-prefill" in self.switches and body.get("continue_final_message"):
            return self._refuse("Assistant response prefill is incompatible with enable_thinking.")
        if "json" in self.switches:
            return web.json_response({"choices": [{"message": {"content": "at once"}}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.num_running += 1
        try:
            if "stall-first" in self.switches:
                await asyncio.sleep(3600)
            await response.prepare(request)
            await self._write(request, response, body)
        except (ClientConnectionResetError, ConnectionResetError, asyncio.CancelledError):
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1
        return response

    async def _write(self, request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
        chunks = _chunks(body, is_chat=request.path.endswith("/chat/completions"), switches=self.switches)
        for num_sent, chunk in enumerate(chunks):
            if num_sent == FAULT_AFTER and await self._fault(request, response):
                return
            await self._send(response, json.dumps(chunk))
            await asyncio.sleep(self.token_s)
        if "no-finish" not in self.switches and "no-done" not in self.switches:
            await response.write(b"data: [DONE]\n\n")

    async def _send(self, response: web.StreamResponse, data: str) -> None:
        event = f"data: {data}\r\n\r\n".encode()
        if "two-halves" in self.switches:
            await response.write(event[: len(event) // 2])
            await asyncio.sleep(0)
            event = event[len(event) // 2 :]
        await response.write(event)

    async def _fault(self, request: web.Request, response: web.StreamResponse) -> bool:
        """The fault in mid-answer, if there is a switch for one. Returns whether the answer ends with it."""
        written = {
            "garbage": b'data: {"choices": [{"delta"\n\n',
            "noise": b"\x00\xff\xfe noise \n\n",
            "huge-line": b"data: " + b"x" * (3 << 20) + b"\n\n",
            "error-event": b'error: {"code": 500, "message": "the slot failed"}\n\n',
            "error-field": b'data: {"error": {"message": "maximum context length is 7 tokens", "code": 400}}\n\n',
        }
        for name, content in written.items():
            if name in self.switches:
                with contextlib.suppress(ConnectionResetError):
                    await response.write(content)
                return True
        if "cut" in self.switches:
            assert request.transport is not None
            request.transport.abort()
            return True
        while "pings" in self.switches:
            await response.write(b": ping\n\n")
            await asyncio.sleep(self.token_s)
        if "stall" in self.switches:
            await asyncio.sleep(3600)
        return False


def _chunks(body: Mapping[str, Any], *, is_chat: bool, switches: frozenset[str]) -> Iterator[dict[str, Any]]:
    """The chunks of one answer, with the end and the token counts."""
    most = 10**9 if "ignores-limit" in switches else int(body["max_tokens"])
    num_tokens, reason = 0, "length"
    for delta in _deltas(body, is_chat):
        if num_tokens == most:
            break
        if "end" in delta:
            reason = delta["end"]
            break
        choice = {"index": 0, "delta": delta} if is_chat else {"index": 0, "text": delta["content"]}
        yield {"choices": [{**choice, "finish_reason": None}]}
        num_tokens += 1
    if "no-finish" not in switches:
        yield {"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": reason}]}
    if body.get("stream_options", {}).get("include_usage") and "no-usage" not in switches:
        yield {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_tokens}}


def _deltas(body: Mapping[str, Any], is_chat: bool) -> Iterator[dict[str, Any]]:
    if not is_chat:
        # a server cannot see where a prompt ends and its answer begins: here the prompt is the first characters
        prompt, begun = body["prompt"][:PROMPT_CHARACTERS], body["prompt"][PROMPT_CHARACTERS:]
        index = 0
        while True:
            yield {"content": text_after(prompt, begun, index)}
            index += 1
    messages = list(body["messages"])
    last = messages.pop() if body.get("continue_final_message") else {"content": ""}
    prompt = str(messages[-1]["content"])
    thought = last.get("reasoning_content", "")
    if "think" in prompt and not last["content"]:
        for index in range(8):
            if len("".join(f"t{number} " for number in range(index + 1))) > len(thought):
                yield {"reasoning_content": f"t{index} "}
    if "call" in prompt:
        yield from _calls(prompt)
        return
    index = 0
    while "short" not in prompt or index < 3:
        yield {"content": text_after(prompt, last["content"], index)}
        index += 1
    yield {"end": "stop"}


def _calls(prompt: str) -> Iterator[dict[str, Any]]:
    """Two calls in pieces; with "one index" as servers send them that number every call 0."""
    for number, name in enumerate(("look", "listen")):
        index = 0 if "one index" in prompt else number
        function = {"name": name, "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": f"id-{number}", "type": "function", "function": function}]}
        for part in ('{"at": ', f"{number}}}"):
            yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}
    yield {"end": "tool_calls"}


@contextlib.asynccontextmanager
async def serving_fake(server: FakeModelServer, port: int = 0) -> AsyncIterator[str]:
    """Serve a fake on the running event loop. Yields its base URL."""
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class FakeProcess:
    """A fake in a process of its own, which can be killed and started again at the same port."""

    def __init__(self, kind: str, port: int, switches: Sequence[str] = (), token_s: float = TOKEN_S) -> None:
        self.url = f"http://127.0.0.1:{port}"
        more = [argument for switch in switches for argument in ("--switch", switch)]
        self._argv = ["--port", str(port), "--kind", kind, "--token-s", str(token_s), *more]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        command = [sys.executable, "-m", "tests.support.fake_openai", *self._argv]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith("ready")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def num_running(self) -> int | None:
        with urllib.request.urlopen(f"{self.url}/fake/state", timeout=10) as reply:
            return int(json.load(reply)["running"])


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kind", choices=KINDS, default="other")
    parser.add_argument("--switch", choices=sorted(SWITCHES), action="append", default=[])
    parser.add_argument("--token-s", type=float, default=TOKEN_S)
    args = parser.parse_args()
    server = FakeModelServer(args.kind, frozenset(args.switch), token_s=args.token_s)
    async with serving_fake(server, args.port) as url:
        print(f"ready at {url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
