"""A cable with a delay: passes Ethernet frames between two interfaces, each some time after it came. Run as a child.

`python -m tests.links.delay LEFT RIGHT SECONDS`, in the namespace that has both interfaces. For kernels without netem.
`python -m tests.links.delay --whole-frames NAME` makes an interface send frames with checksums, no larger than its
MTU: a virtual interface leaves both to the other end, and a raw socket would pass on what is not finished.
"""

from __future__ import annotations

import array
import fcntl
import selectors
import socket
import struct
import sys
import time
from collections import deque

ETH_P_ALL = 3
SIOCETHTOOL = 0x8946
TX_CHECKSUMS, TCP_SEGMENTS = 0x17, 0x1F  # ETHTOOL_STXCSUM, ETHTOOL_STSO in linux/ethtool.h
MAX_FRAME = 65536
MAX_WAITING = 4096
"""Frames on their way in one direction: what a queue of some MB holds. More are lost, as on a real link."""


def opened(name: str) -> socket.socket:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    link.bind((name, 0))
    link.setblocking(False)
    return link


def whole_frames(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        for feature in (TX_CHECKSUMS, TCP_SEGMENTS):
            value = array.array("B", struct.pack("II", feature, 0))
            request = struct.pack("16sP", name.encode(), value.buffer_info()[0])
            fcntl.ioctl(link, SIOCETHTOOL, request)


def relay(left: str, right: str, delay_s: float) -> None:
    ends = opened(left), opened(right)
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    with selectors.DefaultSelector() as selector:
        for index, end in enumerate(ends):
            selector.register(end, selectors.EVENT_READ, index)
        while True:
            due = min((queue[0][0] for queue in waiting if queue), default=None)
            for key, _ in selector.select(None if due is None else max(0.0, due - time.monotonic())):
                take(ends[key.data], waiting[key.data], delay_s)
            now = time.monotonic()
            for index, queue in enumerate(waiting):
                while queue and queue[0][0] <= now:
                    send(ends[1 - index], queue.popleft()[1])


def take(end: socket.socket, queue: deque[tuple[float, bytes]], delay_s: float) -> None:
    """All frames that have arrived; those that this process sends are seen here as well."""
    while True:
        try:
            frame, address = end.recvfrom(MAX_FRAME)
        except (BlockingIOError, OSError):  # nothing more, or the interface is down
            return
        if address[2] != socket.PACKET_OUTGOING and len(queue) < MAX_WAITING:
            queue.append((time.monotonic() + delay_s, frame))


def send(end: socket.socket, frame: bytes) -> None:
    try:
        end.send(frame)
    except OSError:  # full, or the interface is down: the frame is lost
        return


if __name__ == "__main__":
    if sys.argv[1] == "--whole-frames":
        whole_frames(sys.argv[2])
    else:
        relay(sys.argv[1], sys.argv[2], float(sys.argv[3]))
