"""What a supervised run needs to know: its settings, its position among several hosts, and how its ranks meet.

Made by the command line from a recipe, or by a test. With several hosts there is one supervisor per host. The one of
host 0 is the head: it holds the run, decides and pronounces the verdict. The others follow it (`link.py`).
"""

from __future__ import annotations

import array
import fcntl
import os
import re
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ups.errors import ConfigError, MachineError
from ups.record.identity import RunIdentity
from ups.supervise.standstill import Deadlines

if TYPE_CHECKING:
    from ups.supervise.bucket_mirror import BucketMirror
    from ups.supervise.trackers import Trackers

_SIOCGIFCONF = 0x8912
_INTERFACE_BYTES = 40  # struct ifreq
_MAX_HOSTS = 10_000
_NAME = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class HostInfo:
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


def find_host_info(
    count: int, ranks: int, number: int | None, address: str, interface: str, environ: Mapping[str, str] | None = None
) -> HostInfo:
    """The position of this supervisor, from options, else from Slurm. Raises ConfigError.

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
    return HostInfo(number, count, name, ip, port, interface or interface_towards(ip, port))


def _resolve(address: str) -> tuple[str, int]:
    hint = "--address ADDRESS:PORT, an IPv4 address of host 0 that the others reach and a free port there"
    if not address:
        raise ConfigError("a run over several hosts needs an address at which they meet", hint=hint)
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"'{address}' is not ADDRESS:PORT", hint=hint)
    try:
        ip = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"'{host}' has no IPv4 address here: {error.strerror}", hint=hint) from error
    if ip.startswith("127.") and ip != host:
        # Many systems give a host its own name on the loopback interface, where no other host comes in.
        raise ConfigError(f"'{host}' is {ip} here, which other hosts do not reach", hint=hint)
    return ip, int(port)


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
    addresses = []
    for begin in range(0, used, _INTERFACE_BYTES):
        entry = space[begin : begin + _INTERFACE_BYTES].tobytes()
        name = entry[:16].split(b"\0")[0].decode().partition(":")[0]  # eth0:1 is a second address of eth0
        addresses.append((name, socket.inet_ntoa(entry[20:24])))
    return addresses


# Read by `ups.distributed.environment`: file:///PATH or tcp://ADDRESS:PORT.
VARIABLE = "UPS_RENDEZVOUS"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_FILE_NAME = "store"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A file in a private directory if `address` is empty, else a store that rank 0 opens at exactly that address.

    address: numeric IPv4 address of the host of rank 0, on the interface that is meant; port: a free one there;
    interface: name of the interface that ranks talk over (gloo and NCCL).
    """

    address: str = ""
    port: int = 0
    interface: str = "lo"

    def variables(self, box_dir: Path) -> dict[str, str]:
        """What every rank gets. Makes a new directory each time, so that no attempt meets the file of another."""
        url = f"tcp://{self.address}:{self.port}"
        if not self.address:
            folder = tempfile.mkdtemp(prefix="rendezvous-", dir=box_dir.absolute())
            url = f"file://{folder}/{_FILE_NAME}"
        # Said even if the person has named another interface for another purpose: on one host nothing leaves it.
        return {VARIABLE: url, **dict.fromkeys(_INTERFACES, self.interface)}


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one supervised run.

    `command` is what each rank runs. `micro_batch_size` is what a rank forwards at once; with 0 an out-of-memory fault
    is restarted as it is. `chosen` are settings that were found for this machine, by their names in the recipe; what an
    earlier attempt has found stays. `identity` is what checkpoints must carry; None where ranks are not ours.
    `check_inputs` raises if recipe, statistics or data are not those that the run was started with; it is called before
    each restart and before success is declared. `last_step` is where a finished run must stand, where the recipe fixes
    it. `trackers` and `mirror` are looked at, not waited for. `ranks` are those of the whole run; in a run over several
    hosts (`host_info`) those of this host are `local_ranks`.
    """

    run_dir: Path
    ranks: int
    command: tuple[str, ...]
    max_restarts: int = 3
    micro_batch_size: int = 0
    chosen: Mapping[str, int] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    environment: Mapping[str, str] = field(default_factory=dict)
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    # After the first death: how long the others get to write down what they saw, before all are ended.
    settle_seconds: float = 1.0
    poll_seconds: float = 0.1
    # Rank whose output is shown; None shows none.
    show_rank: int | None = 0
    identity: RunIdentity | None = None
    check_inputs: Callable[[], None] | None = None
    last_step: int | None = None
    trackers: Trackers | None = None
    mirror: BucketMirror | None = None
    host_info: HostInfo | None = None

    @property
    def local_ranks(self) -> range:
        """The ranks that this supervisor starts and watches."""
        host = self.host_info
        return range(self.ranks) if host is None else host.ranks_of(host.number, self.ranks)

    @property
    def host(self) -> str:
        """How this host is called in lines and records."""
        return os.uname().nodename if self.host_info is None else self.host_info.label

    @property
    def evidence_name(self) -> str:
        """The file for evidence: of each host its own, because they share the directory."""
        return "evidence.json" if self.host_info is None else f"evidence.host_{self.host_info.number:05d}.json"
