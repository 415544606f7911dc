"""Starts a llama-server for one model, watches it while it loads, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from pathlib import Path

import psutil

from exo_mesh.engine.contract import LoadProgress
from exo_mesh.errors import EngineError, MeshError, ModelError
from exo_mesh_openai import tied
from exo_mesh_openai.argv import LlamaServerFlags, command_line
from exo_mesh_openai.client import Deadlines, ServerClient
from exo_mesh_openai.gguf_files import find_gguf_model, program_defect
from exo_mesh_openai.options import OwnServer, ServerAddress

LOAD_S = 1800.0
"""Longest load of a model, from a slow disk."""

TERM_S = 0.6
"""How long the program may take to end by itself. It has nothing to save, and its runner has 1 s to end."""

POLL_S = 0.1
MAX_TAIL = 4000
"""Last bytes of what the program printed, kept for errors."""

LAST_WORDS_S = 1.0
"""How long the end of a program, and its last output with the reason, are waited for."""

_SHOWN_LINES = 5
_TRIES = 2
"""Another program may take the free port before llama-server does."""


class SupervisedServer:
    """A llama-server of our own. It listens on 127.0.0.1 and wants a key that only this process knows, so that no other
    user of the machine can use it. It never outlives this process by more than 2 s."""

    def __init__(self, own: OwnServer, load_s: float = LOAD_S) -> None:
        self.address: ServerAddress | None = None
        self.key = secrets.token_hex(32)
        self._own = own
        self._load_s = load_s
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._tail = bytearray()

    async def start(self, served_name: str, progress: LoadProgress) -> ServerAddress:
        """Start the program for a model and wait until it serves requests; its address is returned.

        progress: bytes of the model's file that are in memory. Raises ModelError that names the missing file, or
        EngineError with the last lines that the program printed.
        """
        defect = program_defect(self._own.binary)
        if defect:
            raise EngineError(defect)
        model = find_gguf_model(self._own.models, served_name)
        _check_draft(self._own.flags)
        total = max(1, model.stat().st_size)
        for attempt in range(_TRIES):
            port = _free_port()
            await self._spawn(command_line(self._own.binary, model, port, self._own.flags))
            address = ServerAddress(f"http://127.0.0.1:{port}", f"127.0.0.1:{port}")
            if await self._wait(address, total, progress):
                self.address = address
                return address
            if attempt + 1 == _TRIES or b"bind" not in self._tail:
                break
        raise EngineError(f"{self.defect()}, while it loaded {served_name}")

    def defect(self) -> str:
        """Why the program does not run; "" while it does."""
        if self._process is None:
            return "llama-server was not started"
        if self._process.returncode is None:
            return ""
        lines = self._tail.decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
        said = f": {' | '.join(line.strip() for line in lines)}" if lines else ""
        return f"llama-server ended with exit code {self._process.returncode}{said}"

    async def wait_for_defect(self) -> str:
        """As `defect`, after a connection to the program broke: the system may report the end of a process a moment
        after the end of its connections."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._process.wait()
        return self.defect()

    def memory_bytes(self) -> int:
        """Resident bytes of the program; 0 if it does not run."""
        if self._process is None or self._process.returncode is not None:
            return 0
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    async def close(self) -> None:
        """End the program: SIGTERM, and SIGKILL if that is not enough."""
        process = self._process
        if process is not None and process.returncode is None:
            _signal(process.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(TERM_S):
                    await process.wait()
            except TimeoutError:
                _signal(process.pid, signal.SIGKILL)
                await process.wait()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
            self._reader = None

    async def _spawn(self, command: list[str]) -> None:
        await self.close()
        self._tail.clear()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", str(Path(tied.__file__)), str(os.getpid())),
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "LLAMA_API_KEY": self.key},
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read(self._process), name="output of llama-server")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Keep the end of what the program prints; a full pipe would stop it."""
        assert process.stdout is not None
        while part := await process.stdout.read(4096):
            self._tail += part
            del self._tail[:-MAX_TAIL]

    async def _wait(self, address: ServerAddress, total: int, progress: LoadProgress) -> bool:
        """Wait until the program serves requests; False if it ends before that."""
        client = ServerClient(address, self.key, Deadlines(connect_s=1.0, probe_s=2.0))
        done = 0
        progress(0, total)
        try:
            async with asyncio.timeout(self._load_s):
                while not self.defect():
                    if await _is_healthy(client):
                        progress(total, total)
                        return True
                    done = max(done, min(self.memory_bytes(), total - 1))
                    progress(done, total)
                    await asyncio.sleep(POLL_S)
        except TimeoutError as exc:
            await self.close()
            raise EngineError(f"llama-server did not serve its model within {self._load_s:g} s") from exc
        finally:
            await client.close()
        assert self._reader is not None
        await asyncio.wait({self._reader}, timeout=LAST_WORDS_S)
        return False


async def _is_healthy(client: ServerClient) -> bool:
    try:
        return (await client.ask("/health")).status == 200
    except MeshError:
        return False


def _check_draft(flags: LlamaServerFlags) -> None:
    if flags.drafts and flags.draft_model is not None and not flags.draft_model.is_file():
        raise ModelError(f"the draft model {flags.draft_model} does not exist; {flags.spec_type} needs it")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal(pid: int, number: signal.Signals) -> None:
    """Signal the program and its children, which are a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
