"""A runner process and the node's end of the pipe to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence

import msgspec

from exo_mesh.domain.wiring_rules import MLX_VARIABLES
from exo_mesh.engine.process_environment import ALLOCATOR, compute_environment
from exo_mesh.settings.config import SECRET_VARIABLE
from exo_mesh.wire import runner_pipe
from exo_mesh.wire.channel_options import QUICK_POLLING

RUNNER_ENVIRONMENT = {**ALLOCATOR, **QUICK_POLLING}


class RunnerChild(msgspec.Struct):
    """A runner's process and the node's end of its pipe. Call `open` before `reader` and `writer`."""

    process: asyncio.subprocess.Process
    pipe: socket.socket
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> None:
        """Wrap the pipe in streams; a second call does nothing."""
        if self._streams is None:
            self._streams = await runner_pipe.open_pipe(self.pipe)

    @property
    def reader(self) -> asyncio.StreamReader:
        assert self._streams is not None, "open first"
        return self._streams[0]

    @property
    def writer(self) -> asyncio.StreamWriter:
        assert self._streams is not None, "open first"
        return self._streams[1]

    def close(self) -> None:
        """Close this end of the pipe; the process ends by that, if it has not already."""
        if self._streams is not None:
            self._streams[1].close()
        else:
            self.pipe.close()


async def spawn(command: Sequence[str], environment: Mapping[str, str]) -> RunnerChild:
    """Start a new runner process, in a session of its own. Raises OSError."""
    ours, theirs = runner_pipe.socket_pair()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            "--control-fd",
            str(theirs.fileno()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**compute_environment(_for_runner(environment)), **RUNNER_ENVIRONMENT},
            start_new_session=True,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return RunnerChild(process, ours)


def _for_runner(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the mesh secret and the variables of MLX: a runner gets a certificate over its pipe and
    does not need the secret, nor the rank of a node that was started by `mlx.launch`."""
    return {name: value for name, value in environment.items() if name not in (SECRET_VARIABLE, *MLX_VARIABLES)}
