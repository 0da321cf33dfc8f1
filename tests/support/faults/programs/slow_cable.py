"""`python slow_cable.py NAME NAME SECONDS`: carries frames between two network interfaces, each one a while later.

For kernels without netem. Packet sockets see frames before the network card would fill in checksums and cut them to
size, so hosts on such a cable must do both themselves: `plain_cable` asks for it.
"""

import array
import fcntl
import heapq
import itertools
import selectors
import socket
import struct
import sys
import time

_ALL_PROTOCOLS, _OUTGOING = 3, 4  # ETH_P_ALL, PACKET_OUTGOING
_ETHTOOL, _SET_CHECKSUMS, _SET_SEGMENTS = 0x8946, 0x17, 0x1F  # SIOCETHTOOL, ETHTOOL_STXCSUM, ETHTOOL_STSO


def plain_cable(name: str) -> None:
    """Let the kernel fill in checksums and cut large sends before they reach an interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in (_SET_SEGMENTS, _SET_CHECKSUMS):
            value = array.array("B", struct.pack("II", command, 0))
            fcntl.ioctl(control, _ETHTOOL, struct.pack("16sP", name.encode(), value.buffer_info()[0]))


def main() -> None:
    if sys.argv[1] == "--plain":
        plain_cable(sys.argv[2])
        return
    delay = float(sys.argv[3])
    ends = []
    for name in sys.argv[1:3]:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
        end.bind((name, 0))
        ends.append(end)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    order = itertools.count()
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    print("ready", flush=True)
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, selectors.EVENT_READ)
        while True:
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            for key, _ in selector.select(pause):
                frame, sender = key.fileobj.recvfrom(1 << 17)  # type: ignore[union-attr]
                if sender[2] != _OUTGOING:
                    target = other[key.fileobj]  # type: ignore[index]
                    heapq.heappush(waiting, (time.monotonic() + delay, next(order), target, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(waiting)
                target.send(frame)


if __name__ == "__main__":
    main()
