"""Which sockets processes listen on, as the kernel reports it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True)
class Listening:
    """One TCP socket that waits for connections."""

    pid: int
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int

    @property
    def beyond_loopback(self) -> bool:
        """Whether another host could reach it."""
        return not self.address.is_loopback


def listening_sockets(pids: Iterable[int]) -> list[Listening]:
    """Every TCP socket that one of these processes listens on, over IPv4 and IPv6."""
    owner = {inode: pid for pid in pids for inode in _socket_inodes(pid)}
    sockets = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in owner:
                address, _, port = fields[1].partition(":")
                words = bytes.fromhex(address)  # each group of four bytes is a number of this machine: little-endian
                packed = b"".join(words[n : n + 4][::-1] for n in range(0, len(words), 4))
                sockets.append(Listening(owner[fields[9]], ipaddress.ip_address(packed), int(port, 16)))
    return sockets


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    return inodes
