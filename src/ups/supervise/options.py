"""What a supervised run needs to know; made by the command line from a recipe, or by a test."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.record.identity import RunIdentity
from ups.supervise.deadlines import Deadlines
from ups.supervise.host_place import HostPlace
from ups.supervise.rendezvous import Rendezvous

if TYPE_CHECKING:
    from ups.supervise.bucket_mirror import BucketMirror
    from ups.supervise.trackers import Trackers


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one supervised run.

    `command` is what each rank runs. `micro_batch_size` is what a rank forwards at once and `batch_size` what it must
    divide; with 0 an out-of-memory fault is restarted as it is. `chosen` are settings that were found for this
    machine, by their names in the recipe; what an earlier attempt has found stays. `on_verdict` gets the final run
    document. `identity` is what checkpoints must carry; None where ranks are not ours. `check_inputs` raises if
    recipe, statistics or data are not those that the run was started with; it is called before each restart and
    before success is declared. `last_step` is where a finished run must stand, where the recipe fixes it.
    `trackers` and `mirror` are looked at, not waited for. `ranks` are those of the whole run; with a `place` among
    several hosts those of this host are `local_ranks`.
    """

    run_dir: Path
    ranks: int
    command: tuple[str, ...]
    max_restarts: int = 3
    micro_batch_size: int = 0
    chosen: Mapping[str, int] = field(default_factory=dict)
    batch_size: int = 0
    deadlines: Deadlines = field(default_factory=Deadlines)
    environment: Mapping[str, str] = field(default_factory=dict)
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    # After the first death: how long the others get to write down what they saw, before all are ended.
    settle_seconds: float = 1.0
    poll_seconds: float = 0.1
    # Rank whose output is shown; None shows none.
    show_rank: int | None = 0
    on_verdict: Callable[[dict[str, Any]], None] | None = None
    identity: RunIdentity | None = None
    check_inputs: Callable[[], None] | None = None
    last_step: int | None = None
    trackers: Trackers | None = None
    mirror: BucketMirror | None = None
    place: HostPlace | None = None

    @property
    def local_ranks(self) -> range:
        """The ranks that this supervisor starts and watches."""
        return range(self.ranks) if self.place is None else self.place.ranks_of(self.place.number, self.ranks)

    @property
    def host(self) -> str:
        """How this host is called in lines and records."""
        return os.uname().nodename if self.place is None else self.place.label

    @property
    def evidence_name(self) -> str:
        """The file for evidence: of each host its own, because they share the directory."""
        return "evidence.json" if self.place is None else f"evidence.host_{self.place.number:05d}.json"
