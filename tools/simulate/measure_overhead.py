"""python -m tools.simulate.measure_overhead [CALLS]: bytes on the wire of a control call, besides its two protobufs.

Run it where nothing else uses the loopback: `unshare -rn sh -c "ip link set lo up; python -m ..."`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from exo_mesh.mesh.membership.calls import PROBE
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.control_server import ControlServer
from exo_mesh.wire.peer_call import answer
from exo_mesh.wire.proto import control_pb2 as pb

CALLS = 200
"""Default number of measured calls."""


async def probe(request: pb.ProbeRequest) -> pb.ProbeReply:
    return pb.ProbeReply(peer_id=request.target, incarnation=1)


def loopback_bytes() -> int:
    """Bytes received on `lo` since its start, IP and TCP headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    raise SystemExit("there is no loopback here")


async def measure(calls: int) -> None:
    server = ControlServer([answer(PROBE, probe)])
    port = await server.start("127.0.0.1", 0)
    client = ControlClient(f"127.0.0.1:{port}")
    request = pb.ProbeRequest(from_peer="a" * 32, incarnation=1, target="b" * 32)
    reply = await client.call(PROBE, request)
    before = loopback_bytes()
    for _ in range(calls):
        await client.call(PROBE, request)
        await asyncio.sleep(0.02)  # spaced like real calls, so that no two are sent together
    passed = loopback_bytes() - before
    per_call = passed / calls
    print(f"{per_call:.0f} bytes per call, {(per_call - request.ByteSize() - reply.ByteSize()) / 2:.0f} per message")
    await client.close()
    await server.stop()


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if sys.argv[1:] else CALLS))
