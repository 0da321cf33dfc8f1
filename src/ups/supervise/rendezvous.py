"""How the ranks of a run find each other, and on which interface they then talk.

On one host through a file in a directory that only this user can enter: nothing listens, and nobody else can write.
Through a TCP store where ranks are on several hosts: that store has no authentication (docs/failures.md says what to
close). What a rank does with it is in `ups.distributed.runtime`.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from ups.errors import ConfigError

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

    def __post_init__(self) -> None:
        if bool(self.address) != bool(self.port):
            raise ConfigError("a rendezvous over TCP needs an address and a port", hint="give both, or neither")

    def variables(self, box_dir: Path) -> dict[str, str]:
        """What every rank gets. Makes a new directory each time, so that no attempt meets the file of another."""
        url = f"tcp://{self.address}:{self.port}"
        if not self.address:
            folder = tempfile.mkdtemp(prefix="rendezvous-", dir=box_dir.absolute())
            url = f"file://{folder}/{_FILE_NAME}"
        # Said even if the person has named another interface for another purpose: on one host nothing leaves it.
        return {VARIABLE: url, **dict.fromkeys(_INTERFACES, self.interface)}
