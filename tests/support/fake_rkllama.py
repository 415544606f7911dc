"""A server that behaves as RKLLAMA does, without an NPU: `python -m tests.support.fake_rkllama --port N`.

Each habit of RKLLAMA that differs from other servers has a switch in `Quirk`. An answer is a function of the last user
message, so that several boards give the same one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import re
import subprocess
import sys
import urllib.request
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from aiohttp import web

from exo_mesh.cli.client.child_node import free_port

ROOT = Path(__file__).resolve().parents[2]

MODELS = ("Qwen3-1.7B", "TinyLlama 1.1B")
"""Directories, one with a space."""
LENGTH = 60
"""Tokens of an answer that is not limited otherwise."""
ABORTED = "Aborted inference by Timeout (300 seconds). Try again."
WORDS = ("rain", "stone", "river", "lamp", "north", "seven", "glass", "slow", "bird", "hill", "open", "salt", "wood")


class Quirk(StrEnum):
    """What a server does differently. Without any it is an old acquaintance: it honours limits and notices hang-ups."""

    ALREADY_LOADED = "already_loaded"
    """Loading a loaded model answers 200 with an error."""
    ONE_MODEL = "one_model"
    """Loading any model answers 400 while another, or the same, is loaded."""
    UNKNOWN_IS_500 = "unknown_is_500"
    """An unknown model is an error of the server, reported as a string."""
    IGNORES_LIMIT = "ignores_limit"
    STOP_AT_LIMIT = "stop_at_limit"
    """finish_reason is "stop" at the limit too."""
    NEW_IDS = "new_ids"
    """Each event of a stream has another id."""
    HOLDS_TOOLS = "holds_tools"
    """Up to 100 tokens are held back while tools are offered, then all calls come in one chunk."""
    PYTHON_ARGUMENTS = "python_arguments"
    """/v1 prints arguments as Python does, with every ' replaced by "."""
    THINKS = "thinks"
    ABORT_TEXT = "abort_text"
    """The answer ends after three tokens with the words of a timeout."""
    ABORT_SILENT = "abort_silent"
    """The answer ends after three tokens without statistics."""
    GOES_ON = "goes_on"
    """A client that hangs up does not end the computation."""
    LEAVES_REST = "leaves_rest"
    """What nobody read of an answer stands at the beginning of the next one."""
    UNLOADS = "unloads"
    """The model is unloaded before each second request."""
    NEVER_BEGINS = "never_begins"
    DIES = "dies"
    """The connection breaks after three tokens."""
    GARBAGE = "garbage"
    """A line of the answer is no JSON."""
    ENDLESS_LINE = "endless_line"
    NO_COUNTS = "no_counts"
    """Counts of tokens are 0."""
    GGUF = "gguf"
    """The model is proxied to a llama-server, whose events /api/chat passes on."""
    DETAILS = "details"
    """Errors are below "detail"."""


TODAY = frozenset(
    {Quirk.ALREADY_LOADED, Quirk.UNKNOWN_IS_500, Quirk.STOP_AT_LIMIT, Quirk.NEW_IDS, Quirk.HOLDS_TOOLS,
     Quirk.PYTHON_ARGUMENTS, Quirk.GOES_ON, Quirk.LEAVES_REST}
)  # fmt: skip
"""The habits of version 0.0.74."""


def question_of(body: Mapping[str, Any]) -> str:
    """The last user message, or the prompt."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return str(body.get("prompt", messages or ""))
    return next((str(one["content"]) for one in reversed(messages) if one.get("role") == "user"), "")


def tokens_of(question: str) -> list[str]:
    """The answer to a question: after "say: " the rest of it, else words that follow from its hash."""
    if question.startswith("say: "):
        return re.findall(r"\s*\S+|\s+$", question.removeprefix("say: "))
    seed = hashlib.sha256(question.encode()).digest()
    return [f" {WORDS[(seed[index % 32] + index * index) % len(WORDS)]}" for index in range(LENGTH)]


class Pipe:
    """The tokens that a worker has computed and nobody has read yet; None ends an answer."""

    def __init__(self) -> None:
        self._tokens: deque[str | None] = deque()
        self._arrived = asyncio.Event()

    def send(self, token: str | None) -> None:
        self._tokens.append(token)
        self._arrived.set()

    async def answer(self) -> AsyncIterator[str]:
        """The tokens up to the end of an answer."""
        while True:
            while not self._tokens:
                self._arrived.clear()
                await self._arrived.wait()
            token = self._tokens.popleft()
            if token is None:
                return
            yield token


@dataclass
class Work:
    """An answer in computation. calls: tool calls, instead of the tokens. finish: the finish reason."""

    model: str
    pipe: Pipe
    tokens: list[str]
    calls: list[dict[str, Any]]
    num_prompt: int
    finish: str
    is_cancelled: bool = False


@dataclass
class FakeRkllama:
    """The server. token_s: time for one token. bodies: of all requests for answers, in order."""

    quirks: Collection[Quirk] = TODAY
    dialect: str = "ollama"
    models: tuple[str, ...] = MODELS
    token_s: float = 0.0
    load_s: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    num_running: int = 0
    most_running: int = 0
    num_served: int = 0

    def __post_init__(self) -> None:
        # each model has a worker, with a queue and a pipe
        self._queues: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._pipes: dict[str, Pipe] = defaultdict(Pipe)
        self._tasks: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        app = web.Application()
        add = app.router.add_route
        add("GET", "/fake/state", self._state)
        if self.dialect != "documented":
            add("GET", "/", self._welcome)
            add("POST", "/load_model", self._load)
            add("POST", "/unload_model", self._unload)
            add("GET", "/current_model", self._current)
        if self.dialect in ("ollama", "openai", "native"):
            add("GET", "/models", self._native_models)
        if self.dialect == "ollama":
            add("GET", "/api/tags", self._tags)
            add("POST", "/api/chat", self._answer)
            add("POST", "/api/generate", self._answer)
        if self.dialect in ("ollama", "openai"):
            add("GET", "/v1/models", self._v1_models)
            add("POST", "/v1/chat/completions", self._answer)
            add("POST", "/v1/completions", self._answer)
        if self.dialect in ("native", "documented"):
            add("POST", "/generate", self._answer)
        if self.dialect == "documented":
            add("GET", "/health", self._health)
            add("POST", "/model/load", self._load)
        app.on_cleanup.append(self._stop)
        return app

    async def _stop(self, app: web.Application) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _state(self, request: web.Request) -> web.Response:
        state = {"served": self.num_served, "running": self.num_running, "most_running": self.most_running}
        return web.json_response({**state, "loads": self.loads, "num_bodies": len(self.bodies)})

    async def _welcome(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "Welcome to RKLLama with Ollama API compatibility!", "github": "x"})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _native_models(self, request: web.Request) -> web.Response:
        return web.json_response({"models": list(self.models)})

    async def _tags(self, request: web.Request) -> web.Response:
        return web.json_response({"models": [{"name": name, "model": name, "size": 1} for name in self.models]})

    async def _v1_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _current(self, request: web.Request) -> web.Response:
        if not self.loaded:
            return self._error(404, "No model is currently loaded.")
        return web.json_response({"model_name": next(iter(self.loaded))})

    def _error(self, status: int, message: str) -> web.Response:
        return web.json_response({"detail" if Quirk.DETAILS in self.quirks else "error": message}, status=status)

    async def _load(self, request: web.Request) -> web.Response:
        name = (await request.json())["model_name"]
        if name not in self.models:
            return self._error(400, f"Model directory '{name}' not found.")
        if Quirk.ONE_MODEL in self.quirks and self.loaded:
            return self._error(400, "A model is already loaded. Please unload it first.")
        if name in self.loaded and Quirk.ALREADY_LOADED in self.quirks:
            return web.json_response({"error": "A model is already loaded. Nothing to do."})
        await asyncio.sleep(self.load_s)
        self.loaded.add(name)
        self.loads.append(name)
        return web.json_response({"message": f"Model {name} loaded successfully."})

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["model_name"]
        if name not in self.loaded and Quirk.ONE_MODEL not in self.quirks:
            return self._error(400, f"No model {name} are currently loaded.")
        self.loaded.clear()
        await self._stop(request.app)  # the worker process of the model ends, and its pipe with it
        self._pipes.clear()
        return web.json_response({"message": f"Model {name} successfully unloaded!"})

    def _admit(self, path: str, body: dict[str, Any]) -> web.Response | None:
        """The refusal of a request, or None."""
        if path == "/generate":
            if Quirk.UNLOADS in self.quirks and len(self.bodies) % 2 == 0:
                self.loaded.clear()
            return None if self.loaded else self._error(400, "No model is currently loaded.")
        name = str(body["model"]).partition("/")[2] or body["model"]
        if name not in self.models:
            missing = f"Failed to load model '{name}': Model directory '{name}' not found."
            return self._error(500 if Quirk.UNKNOWN_IS_500 in self.quirks else 404, missing)
        self.loaded.add(name)
        return None

    def _work(self, body: dict[str, Any], model: str, pipe: Pipe) -> Work:
        question = question_of(body)
        options = body.get("options", body)
        limit = options.get("num_predict", options.get("max_tokens", 1024))
        tokens, calls = tokens_of(question), []
        if body.get("tools") and question.startswith("call: "):
            for part in question.removeprefix("call: ").split(" ; "):
                name, _, arguments = part.partition(" ")
                calls.append({"function": {"name": name, "arguments": json.loads(arguments)}})
            tokens = ["<tool_call>"]
        if Quirk.THINKS in self.quirks:
            tokens = ["<th", "ink>", "\n", "Let me", " see.", "\n", "</thi", "nk>", "\n\n", *tokens]
        if Quirk.ABORT_TEXT in self.quirks:
            tokens = [*tokens[:3], ABORTED]
        if Quirk.ABORT_SILENT in self.quirks:
            tokens = tokens[:3]
        finish = "tool_calls" if calls else "stop"
        if len(tokens) > limit and Quirk.IGNORES_LIMIT not in self.quirks:
            tokens = tokens[:limit]
            finish = "stop" if Quirk.STOP_AT_LIMIT in self.quirks else "length"
        return Work(model, pipe, tokens, calls, len(json.dumps(body.get("messages", question)).split()), finish)

    async def _compute(self, work: Work) -> None:
        """The worker of a model: one answer after the other, each token into the one pipe."""
        async with self._queues[work.model]:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            try:
                for token in work.tokens:
                    await asyncio.sleep(self.token_s)
                    if work.is_cancelled:
                        return
                    work.pipe.send(token)
                work.pipe.send(None)
                self.num_served += 1
            finally:
                self.num_running -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if (refused := self._admit(request.path, body)) is not None:
            return refused
        if Quirk.NEVER_BEGINS in self.quirks:
            await asyncio.sleep(3600)
        model = str(body.get("model", ""))
        pipe = self._pipes[model] if Quirk.LEAVES_REST in self.quirks else Pipe()
        work = self._work(body, model, pipe)
        task = asyncio.get_running_loop().create_task(self._compute(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if request.path == "/generate" and not body.get("stream"):
            tokens = [token async for token in work.pipe.answer()]
            return web.json_response({"tokens": tokens})
        try:
            return await self._stream(request, body, work)
        except (ConnectionResetError, asyncio.CancelledError):
            work.is_cancelled = Quirk.GOES_ON not in self.quirks
            raise

    async def _stream(self, request: web.Request, body: dict[str, Any], work: Work) -> web.StreamResponse:
        form = _FORMS["gguf" if Quirk.GGUF in self.quirks else request.path]
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        held: list[str] = []
        num_sent = 0
        async for token in work.pipe.answer():
            if Quirk.DIES in self.quirks and num_sent == 3:
                assert request.transport is not None
                request.transport.abort()
                raise ConnectionResetError
            if Quirk.GARBAGE in self.quirks and num_sent == 3:
                await response.write(b'{"message": {"content": "half\n')
            if Quirk.ENDLESS_LINE in self.quirks and num_sent == 3:
                await response.write(b'{"message": {"content": "' + b"a" * 1_200_000)
            if work.calls or (Quirk.HOLDS_TOOLS in self.quirks and body.get("tools")):
                held.append(token)
            else:
                await response.write(self._line(form, body, token))
            num_sent += 1
        if work.calls:
            await response.write(self._line(form, body, "", calls=work.calls))
        else:
            for token in held:
                await response.write(self._line(form, body, token))
        for line in self._end(form, body, work, num_sent):
            await response.write(line)
        await response.write_eof()
        return response

    def _line(self, form: str, body: dict[str, Any], token: str, calls: list[dict[str, Any]] | None = None) -> bytes:
        if form == "native":
            choice = {"role": "assistant", "content": token, "logprobs": None, "finish_reason": None}
            return json.dumps({"id": "rkllm_chat", "choices": [choice], "usage": {}}).encode() + b"\n\n"
        if form == "chat":
            message = {"role": "assistant", "content": token, **({"tool_calls": calls} if calls else {})}
            return _json_line({"model": body["model"], "message": message, "done": False})
        if form == "generate":
            return _json_line({"model": body["model"], "response": token, "done": False})
        if form == "v1 completion":
            return self._event({"choices": [{"index": 0, "text": token, "finish_reason": None}]})
        delta: dict[str, Any] = {"content": token, "role": "assistant"}
        if calls:
            delta["tool_calls"] = [self._v1_call(index, call) for index, call in enumerate(calls)]
        return self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def _v1_call(self, index: int, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        is_python = Quirk.PYTHON_ARGUMENTS in self.quirks
        text = str(arguments).replace("'", '"') if is_python else json.dumps(arguments)
        function = {"name": call["function"]["name"], "arguments": text}
        return {"id": f"call_{index}", "type": "function", "index": index, "function": function}

    def _end(self, form: str, body: dict[str, Any], work: Work, num_sent: int) -> Iterator[bytes]:
        counts = Quirk.NO_COUNTS not in self.quirks and Quirk.ABORT_SILENT not in self.quirks
        num_prompt, num_output = (work.num_prompt, num_sent) if counts else (0, 0)
        if form == "native":
            choice = {"role": "assistant", "content": "", "logprobs": None, "finish_reason": "stop"}
            usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
            yield json.dumps({"id": "rkllm_chat", "choices": [choice], "usage": usage}).encode() + b"\n\n"
        elif form in ("chat", "generate"):
            duration = None if Quirk.ABORT_SILENT in self.quirks else 1
            text = {"message": {"role": "assistant", "content": ""}} if form == "chat" else {"response": ""}
            stats = {"prompt_eval_count": num_prompt, "eval_count": num_output, "eval_duration": duration}
            yield _json_line({"model": body["model"], **text, "done": True, "done_reason": work.finish, **stats})
        else:
            last = {"delta": {"content": "", "role": "assistant"}} if form == "v1 chat" else {"text": ""}
            yield self._event({"choices": [{"index": 0, **last, "finish_reason": work.finish}]})
            usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "tokens_per_second": 9.0}
            yield self._event({"choices": [], **({"usage": usage} if form == "v1 chat" else {})})
            yield b"data: [DONE]\n\n"

    def _event(self, value: dict[str, Any]) -> bytes:
        name = uuid.uuid4().hex if Quirk.NEW_IDS in self.quirks else "1"
        return b"data: " + json.dumps({"id": f"chatcmpl-{name}", **value}).encode() + b"\n\n"


_FORMS = {
    "/generate": "native",
    "/api/chat": "chat",
    "/api/generate": "generate",
    "/v1/chat/completions": "v1 chat",
    "/v1/completions": "v1 completion",
    "gguf": "v1 chat",
}


def _json_line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


@asynccontextmanager
async def serving(fake: FakeRkllama, port: int = 0) -> AsyncIterator[str]:
    """The address of the server, which runs in this process."""
    runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Board:
    """The server in a process of its own, at one port for all its starts."""

    def __init__(self, *arguments: str) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts it, and returns when it accepts connections. Does nothing if it runs."""
        if self._process is not None:
            return
        command = [sys.executable, "-m", "tests.support.fake_rkllama", "--port", str(self.port), *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith("listening"), "the fake did not start"

    def kill(self) -> None:
        """Ends it at once. Does nothing if it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate(timeout=10)

    def state(self) -> dict[str, Any]:
        """What it has done since its start: `served`, `running`, `most_running`, `loads`, `num_bodies`."""
        with urllib.request.urlopen(f"http://{self.address}/fake/state", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def num_running(self) -> int | None:
        """See ServerUnderTest."""
        return int(self.state()["running"])


@contextmanager
def board(*arguments: str) -> Iterator[Board]:
    """A running server in a process of its own."""
    made = Board(*arguments)
    made.start()
    try:
        yield made
    finally:
        made.kill()


async def _serve(arguments: argparse.Namespace) -> None:
    quirks = frozenset(map(Quirk, arguments.quirk)) if arguments.quirk is not None else TODAY
    fake = FakeRkllama(quirks, arguments.dialect, tuple(arguments.model) or MODELS, arguments.token_s)
    async with serving(fake, arguments.port) as address:
        print(f"listening on {address}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dialect", choices=("ollama", "openai", "native", "documented"), default="ollama")
    parser.add_argument("--model", action="append", default=[], help="a model that it has; may be repeated")
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds for one token")
    parser.add_argument(
        "--quirk", action="append", choices=[str(one) for one in Quirk], help="may be repeated; default: those of today"
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
