"""Forged mDNS answers on the loopback: nodes that do not exist, and broken packets."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter

from zeroconf import DNSAddress, DNSOutgoing, DNSPointer, DNSService, DNSText
from zeroconf.const import (
    _CLASS_IN,
    _DNS_OTHER_TTL,
    _FLAGS_AA,
    _FLAGS_QR_RESPONSE,
    _TYPE_A,
    _TYPE_PTR,
    _TYPE_SRV,
    _TYPE_TXT,
)

from exo_mesh.mesh.discovery.mdns import SERVICE_TYPE
from tools.fuzz.mutate import mutated
from tools.fuzz.rig import Rig

COUNT, NUM_NODES, CLOSED = 20_000, 1, False
FLAGS = ("--discovery", "mdns")
GROUP = ("224.0.0.251", 5353)


def forged(rng: random.Random, namespace: str) -> bytes:
    """Returns an announcement of a node of this namespace at a closed port."""
    node_id = rng.randbytes(16).hex()
    name, server = f"exo-mesh-{node_id[:16]}.{SERVICE_TYPE}", f"exo-mesh-{node_id[:16]}.local."
    out = DNSOutgoing(_FLAGS_QR_RESPONSE | _FLAGS_AA)
    texts = b"".join(bytes([len(text)]) + text for text in (b"id=" + node_id.encode(), b"ns=" + namespace.encode()))
    port, ttl = rng.randrange(1, 1024), _DNS_OTHER_TTL
    address = socket.inet_aton(rng.choice(("127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255")))
    out.add_answer_at_time(DNSPointer(SERVICE_TYPE, _TYPE_PTR, _CLASS_IN, ttl, name), 0)
    out.add_answer_at_time(DNSService(name, _TYPE_SRV, _CLASS_IN, ttl, 0, 0, port, server), 0)
    out.add_answer_at_time(DNSText(name, _TYPE_TXT, _CLASS_IN, ttl, texts), 0)
    out.add_answer_at_time(DNSAddress(server, _TYPE_A, _CLASS_IN, ttl, address), 0)
    return out.packets()[0]


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Sends announcements; half of them are mutated."""
    outcomes: Counter[str] = Counter()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        for number in range(count):
            data = forged(rng, rig.namespace)
            sock.sendto(data if number % 2 else mutated(rng, data)[:8900], GROUP)
            outcomes["forged" if number % 2 else "mutated"] += 1
            if number % 20 == 0:
                await asyncio.sleep(0.005)  # otherwise the kernel drops most before the node reads them
    return outcomes
