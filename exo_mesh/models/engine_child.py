"""Asks an engine's library in a short-lived child process, because a node imports no engine library."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping, Sequence

from exo_mesh.engine.process_environment import compute_environment
from exo_mesh.errors import EngineError
from exo_mesh.settings.config import SECRET_VARIABLE

MAX_ANSWER_BYTES = 64 * 2**20
"""Most bytes of an answer; a self-test of the most ranges takes a fifth of this."""

NICE = 5
"""Priority of the child: it must not slow down the stages that run here."""


async def ask_child(command: Sequence[str], deadline_s: float, what: str) -> Mapping[str, object]:
    """Returns the JSON object in the last line of the child's output; the library may write anything before it.

    The child always ends with this call. Raises EngineError, with the child's last line of errors, if the child does
    not answer in time or its answer is not an object.
    """
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=compute_environment({name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}),
        start_new_session=True,
    )
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, child.pid, NICE)
    try:
        async with asyncio.timeout(deadline_s):
            output, noise = await _read_all(child)
    except TimeoutError as exc:
        raise EngineError(f"{what}: no answer within {deadline_s:.0f} s") from exc
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    answer = _last_object(output)
    if not answer:
        last_words = noise.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise EngineError(f"{what}: {last_words or 'the child process ended without output'}")
    return answer


async def _read_all(child: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """Reads output and errors. The child's input stays open meanwhile, because the child ends when it closes."""
    assert child.stdout is not None and child.stderr is not None
    output, noise = await asyncio.gather(_read_bounded(child.stdout), _read_bounded(child.stderr))
    await child.wait()
    return output, noise


async def _read_bounded(stream: asyncio.StreamReader) -> bytes:
    read = bytearray()
    while piece := await stream.read(2**16):
        read += piece
        if len(read) > MAX_ANSWER_BYTES:
            raise EngineError(f"a child process wrote more than {MAX_ANSWER_BYTES} bytes")
    return bytes(read)


def _last_object(output: bytes) -> Mapping[str, object]:
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
