"""Position of this process among the ranks (RANK, WORLD_SIZE, ...), as the launcher set it, checked. No torch.

`ups.record` reads RANK unchecked where it must: in the wrapper and the failure recorder, which start before this.

Apart from `runtime.py` so that a rank can redirect its output to its own log before it imports anything that may crash.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ups.errors import DistributedError

_HINT = "start ranks with `ups train --ranks N` or torchrun, which set all of RANK, WORLD_SIZE, LOCAL_RANK"
_RENDEZVOUS = re.compile(r"file:///.+|tcp://[0-9.]+:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Position of this process as the launcher gave it; `launched` is False for a plain `python` process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 0
    launched: bool = False
    # Where ranks meet: file:///PATH or tcp://ADDRESS:PORT; '' leaves it to torch (MASTER_ADDR, as torchrun sets it).
    rendezvous: str = ""

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host, so that no traffic has to leave it."""
        return self.local_world_size == self.world_size

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> RankEnvironment:
        """Parse the environment once. Raises DistributedError when it is half set or contradicts itself."""
        env = os.environ if environ is None else environ
        attempt = _number(env, "UPS_ATTEMPT", 0)
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return cls(attempt=attempt)
        missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in env]
        if missing:
            raise DistributedError(f"{', '.join(missing)} not set although other launch variables are", hint=_HINT)
        rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local_rank = _number(env, "LOCAL_RANK")
        local_world = _number(env, "LOCAL_WORLD_SIZE", world)
        if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
            raise DistributedError(
                f"RANK={rank} WORLD_SIZE={world} LOCAL_RANK={local_rank} LOCAL_WORLD_SIZE={local_world} contradict",
                hint=_HINT,
            )
        rendezvous = env.get("UPS_RENDEZVOUS", "")
        if rendezvous and not _RENDEZVOUS.fullmatch(rendezvous):
            raise DistributedError(f"UPS_RENDEZVOUS={rendezvous!r} is neither file:///PATH nor tcp://ADDRESS:PORT")
        return cls(rank, world, local_rank, local_world, attempt, launched=True, rendezvous=rendezvous)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError as error:
        raise DistributedError(f"{name}={text!r} is not a whole number", hint=_HINT) from error
