"""Runs llama.cpp on a whole model in a process on one core, alone or with servers of its own RPC."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from exo_mesh.cli.bench.local_ring import free_endpoints
from exo_mesh.errors import EngineError

ANSWER_S, START_S = 600.0, 60.0
CELLS = 1024
"""Positions for each sequence."""
NUM_IDS = 200


@dataclass(frozen=True)
class Job:
    """So many streams at once, each with a prompt and an answer of so many tokens."""

    streams: int
    prompt: int
    tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return self.streams * self.tokens


@dataclass(frozen=True)
class WholeChild:
    """A process that runs llama.cpp. servers: the processes of its RPC."""

    process: BaseProcess
    connection: Connection
    servers: tuple[BaseProcess, ...] = ()

    async def work(self, job: Job) -> float:
        """Seconds that a job takes. Raises EngineError if the process ends or is late."""
        return await asyncio.to_thread(self.ask, job)

    def ask(self, job: Job | None) -> float:
        """The same, and waits. None: until the model is loaded."""
        try:
            if job is not None:
                self.connection.send(job)
            if not self.connection.poll(ANSWER_S):
                raise EngineError(f"llama.cpp does not answer within {ANSWER_S:.0f} s")
            seconds: float = self.connection.recv()
        except (EOFError, OSError) as exc:
            self.process.join(10)
            raise EngineError(f"the process of llama.cpp ended ({self.process.exitcode})") from exc
        return seconds


@contextmanager
def rpc_servers(libraries: Path, cores: Sequence[int], scratch: Path) -> Iterator[dict[str, BaseProcess]]:
    """Starts a server of llama.cpp's RPC on each core; {endpoint: process}."""
    context = multiprocessing.get_context("spawn")
    servers: dict[str, BaseProcess] = {}
    try:
        for endpoint, core in zip(free_endpoints(len(cores)), cores, strict=True):
            servers[endpoint] = context.Process(target=_serve_rpc, args=(libraries, endpoint, core))
            servers[endpoint].start()
        for endpoint in servers:
            _wait_for(endpoint)
        yield servers
    finally:
        for server in servers.values():
            server.kill()
            server.join(10)


@contextmanager
def whole_child(
    directory: Path,
    options: Mapping[str, str],
    core: int,
    libraries: Path | None = None,
    servers: Mapping[str, BaseProcess] | None = None,
) -> Iterator[WholeChild]:
    """Starts llama.cpp with a model. libraries: those of another build, which also has the RPC."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    chosen = dict(options)
    if libraries is not None:
        chosen["library"] = str(_library(libraries, "llama"))
    args = (far, directory, chosen, core, libraries, tuple(servers or ()))
    process = context.Process(target=_run_whole, args=args)
    process.start()
    far.close()
    child = WholeChild(process, near, tuple((servers or {}).values()))
    try:
        child.ask(None)
        yield child
    finally:
        near.close()
        process.join(10)
        process.kill()


def _serve_rpc(libraries: Path, endpoint: str, core: int) -> None:
    """Runs in a server: serves the CPU until it is killed."""
    os.sched_setaffinity(0, {core})
    calls = _opened(libraries)
    calls.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    device = calls.ggml_backend_dev_by_type(0)
    assert device, "the library has a CPU"
    devices = (ctypes.c_void_p * 1)(device)
    start = calls.ggml_backend_rpc_start_server
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    start(endpoint.encode(), None, 1, 1, ctypes.cast(devices, ctypes.c_void_p))


def _opened(libraries: Path) -> Any:
    """The functions of all of llama.cpp's libraries in a directory. Raises EngineError if one is missing."""
    for name in ("ggml-base", "ggml-cpu", "ggml-rpc", "ggml", "llama"):
        ctypes.CDLL(str(_library(libraries, name)), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(None)


def _library(libraries: Path, name: str) -> Path:
    """The file of a library; that with a version in its name if there are two, because the others refer to it."""
    found = sorted(libraries.glob(f"lib{name}.so*"))
    if not found:
        raise EngineError(f"{libraries} has no lib{name}.so")
    return found[-1]


def _run_whole(
    connection: Connection,
    directory: Path,
    options: Mapping[str, str],
    core: int,
    libraries: Path | None,
    endpoints: Sequence[str],
) -> None:
    """Runs in the process: loads the model, and does each job that it is sent."""
    os.sched_setaffinity(0, {core})
    if libraries is not None:
        _add_servers(_opened(libraries), endpoints)
    whole = _Whole(directory, options)
    connection.send(0.0)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        began = time.perf_counter()
        whole.do(job)
        connection.send(time.perf_counter() - began)


def _wait_for(endpoint: str) -> None:
    """Wait until a server listens: the library ends its process if it cannot connect. Raises EngineError."""
    host, port = endpoint.split(":")
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise EngineError(f"no RPC server listens at {endpoint}") from exc
            time.sleep(0.1)


def _add_servers(calls: Any, endpoints: Sequence[str]) -> None:
    """Make the servers devices, to which the library gives all layers."""
    calls.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    calls.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    calls.ggml_backend_register.argtypes = [ctypes.c_void_p]
    for endpoint in endpoints:
        found = calls.ggml_backend_rpc_add_server(endpoint.encode())
        if not found:
            raise EngineError(f"the RPC server at {endpoint} offers no device")
        calls.ggml_backend_register(found)


class _Whole:
    """llama.cpp with token ids."""

    def __init__(self, directory: Path, options: Mapping[str, str]) -> None:
        from exo_mesh_llamacpp.library import open_library
        from exo_mesh_llamacpp.library_file import chosen_library
        from exo_mesh_llamacpp.options import parse_options
        from exo_mesh_llamacpp.source import open_source
        from exo_mesh_llamacpp.whole import PlainModel

        library = open_library(chosen_library(options))
        parsed = parse_options(options)
        self._model = PlainModel(library, open_source(directory, parsed, lambda: library), parsed)
        self._context = self._model.context(1, CELLS)

    def do(self, job: Job) -> None:
        """All prompts, then a step of all streams at a time."""
        if self._context.slots != job.streams:
            self._context.free()
            self._context = self._model.context(job.streams, CELLS)
        draw = np.random.default_rng(job.streams)
        for slot in range(job.streams):
            self._context.cut(slot, 0)
        ids = np.zeros(job.streams, np.int64)
        together = max(1, min(self._context.max_tokens, 512) // job.prompt)
        for begin in range(0, job.streams, together):
            slots = np.arange(begin, min(begin + together, job.streams))
            prompts = draw.integers(3, NUM_IDS, (len(slots), job.prompt))
            ids[slots] = self._decode(prompts, slots, 0)
        for step in range(job.tokens - 1):
            ids = self._decode(ids[:, None], np.arange(job.streams), job.prompt + step)

    def _decode(self, ids: np.ndarray, slots: np.ndarray, pos0: int) -> np.ndarray:
        """The likeliest next ids. ids: `[slots, n]`."""
        n, context = ids.shape[1], self._context
        amount = ids.size
        self._model.tokens[:amount] = ids.ravel()
        context.positions[:amount] = np.tile(np.arange(pos0, pos0 + n), len(slots))
        context.sequences[:amount] = np.repeat(slots, n)
        context.wanted[:amount] = np.tile(np.arange(n) == n - 1, len(slots))
        logits = context.decode(amount)
        assert logits is not None, "the context has room for all"
        found: np.ndarray = logits.argmax(1)
        return found
