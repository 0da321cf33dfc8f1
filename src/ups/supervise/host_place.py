"""Where a supervisor stands among the hosts of a run, and over which interface its ranks talk to the others.

One supervisor per host. The one of host 0 is the head: it alone holds the run, decides and pronounces the verdict. The
others follow it over one connection each (`link.py`).
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ups.errors import ConfigError, MachineError

_SIOCGIFCONF = 0x8912
_INTERFACE_BYTES = 40  # struct ifreq
_MAX_HOSTS = 10_000
_NAME = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Host `number` of `count`. `name` is for people; the number is what a host is known by.

    address, port: where the head listens for the other supervisors; interface: what gloo and NCCL talk over.
    """

    number: int
    count: int
    name: str
    address: str
    port: int
    interface: str

    @property
    def label(self) -> str:
        """How the host stands in lines and records: 1:gpu-17."""
        return f"{self.number}:{self.name}"

    @property
    def is_head(self) -> bool:
        return self.number == 0

    def ranks_of(self, number: int, world: int) -> range:
        """The ranks of a host: equally many on each, in the order of hosts."""
        share = world // self.count
        return range(number * share, (number + 1) * share)


def find_place(
    count: int, ranks: int, number: int | None, address: str, interface: str, environ: Mapping[str, str] | None = None
) -> HostPlace:
    """The place of this supervisor from options, where one is not given from Slurm. Raises ConfigError.

    number: None takes SLURM_NODEID. interface: '' takes the one that owns the route to the head.
    """
    env = os.environ if environ is None else environ
    if number is None:
        text = env.get("SLURM_NODEID", "")
        if not text.isdigit():
            raise ConfigError("--hosts needs the number of this host", hint="--host 0 on the first, 1 on the next, ...")
        number = int(text)
    if not 2 <= count <= _MAX_HOSTS or not 0 <= number < count:
        raise ConfigError(
            f"host {number} of {count} does not exist", hint="hosts are counted from 0: --hosts 2 --host 1"
        )
    if ranks % count:
        raise ConfigError(
            f"{ranks} ranks cannot be spread evenly over {count} hosts",
            hint=f"--ranks is the number over all hosts: {count}, {2 * count}, ...",
        )
    ip, port = _resolve(address)
    name = _NAME.sub("_", env.get("SLURMD_NODENAME") or os.uname().nodename)[:64]
    return HostPlace(number, count, name, ip, port, interface or interface_towards(ip, port))


def _resolve(address: str) -> tuple[str, int]:
    hint = "--address ADDRESS:PORT, an IPv4 address of host 0 that the others reach and a free port there"
    if not address:
        raise ConfigError("a run over several hosts needs an address at which they meet", hint=hint)
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"'{address}' is not ADDRESS:PORT", hint=hint)
    try:
        return str(ipaddress.IPv4Address(host)), int(port)
    except ValueError:
        pass
    try:
        found = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"'{host}' has no IPv4 address here: {error.strerror}", hint=hint) from error
    if ipaddress.IPv4Address(found).is_loopback:
        # Many systems give a host its own name on the loopback interface, where no other host comes in.
        raise ConfigError(f"'{host}' is {found} here, which other hosts do not reach", hint=hint)
    return found, int(port)


def interface_towards(address: str, port: int) -> str:
    """The interface that owns the route to an address; for an address of this host the one that has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # sends nothing: the kernel only chooses the way
        except OSError as error:
            raise MachineError(
                f"there is no way from this host to {address}: {error.strerror}", hint="check --address and the network"
            ) from error
        own = str(probe.getsockname()[0])
    for name, known in _addresses():
        if known == own:
            return name
    raise MachineError(f"no interface has the address {own}", hint="name one with --interface")


def _addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 address) of this host, as the kernel lists them."""
    space = array.array("B", b"\0" * _INTERFACE_BYTES * 1024)
    pointer, _ = space.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iL", len(space), pointer)
        used = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, asked))[0]
    found = []
    for begin in range(0, used, _INTERFACE_BYTES):
        entry = space[begin : begin + _INTERFACE_BYTES].tobytes()
        name = entry[:16].split(b"\0")[0].decode().partition(":")[0]  # eth0:1 is a second address of eth0
        found.append((name, socket.inet_ntoa(entry[20:24])))
    return found
