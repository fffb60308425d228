"""A network with a delay, for tests: two interfaces, one in a namespace of its own, and a process between them that
hands each packet on when its time has come. Ready-made delays (`tc netem`) are in few kernels.

    python -m tests.e2e.long_way NAMESPACE OURS THEIRS DELAY_S     prints a line when both ends are up
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from itertools import count

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
NAME = "tf-way%d"
PACKET = 2000
"""Bytes, more than the interfaces' 1500."""


def end(number: int, here: str, there: str, namespace: str | None = None) -> int:
    """One end: what is sent to `there` can be read from it. In a namespace it is moved before it is given its name."""
    name = NAME % number
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    inside = [] if namespace is None else ["-n", namespace]
    if namespace is not None:
        subprocess.run(["ip", "link", "set", name, "netns", namespace], check=True)
    subprocess.run(["ip", *inside, "address", "add", here, "peer", there, "dev", name], check=True)
    subprocess.run(["ip", *inside, "link", "set", name, "mtu", "1500", "txqueuelen", "2000", "up"], check=True)
    return tun


def hand_on(first: int, second: int, delay_s: float) -> None:
    """For ever, from each to the other."""
    other = {first: second, second: first}
    on_the_way: list[tuple[float, int, int, bytes]] = []
    numbers = count()
    poll = select.poll()
    for tun in other:
        poll.register(tun, select.POLLIN)
    while True:
        wait_ms = None if not on_the_way else max(0.0, on_the_way[0][0] - time.monotonic()) * 1000
        for tun, _ in poll.poll(wait_ms):
            heapq.heappush(on_the_way, (time.monotonic() + delay_s, next(numbers), other[tun], os.read(tun, PACKET)))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, _, tun, packet = heapq.heappop(on_the_way)
            os.write(tun, packet)


def main() -> None:
    namespace, ours, theirs, delay_s = sys.argv[1:]
    first, second = end(0, ours, theirs), end(1, theirs, ours, namespace)
    print("up", flush=True)
    hand_on(first, second, float(delay_s))


if __name__ == "__main__":
    main()
