"""The supervisor of a host that follows the head: starts, watches and ends the ranks of this host, and reports.

It decides nothing about the run. Each attempt is watched by the same `Attempt` as on one host. If the head is gone or
silent for too long it ends its ranks; if the head stays away it leaves.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ups.errors import HeadLostError, HostLostError, UpsError, exit_code_of_signal
from ups.record.identity import HASHED_VARIABLE, IDENTITY_VARIABLE
from ups.supervise.attempt import Attempt, StopRequest, keep_rings
from ups.supervise.first_cause import position
from ups.supervise.head import outcome_to_json
from ups.supervise.link_endpoints import FollowerLink
from ups.supervise.options import Options, Rendezvous
from ups.supervise.rank_view import RankView, least_advanced
from ups.supervise.status import HostFile
from ups.supervise.supervisor_process import supervising

_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 0.5


def follow(options: Options, say: Callable[[str], None], version: str) -> int:
    """Follow the head until its verdict; returns the exit code of the run.

    Raises HeadLostError if the head is gone, HostLostError if it never came, ConfigError if it refuses this host.
    """
    host_info = options.host_info
    assert host_info is not None
    name = f"live_{host_info.number:05d}"
    with (
        supervising(options.run_dir, len(options.local_ranks), say, name) as (stop_request, output, root),
        contextlib.closing(FollowerLink(host_info, options.ranks, version, options.run_dir)) as link,
    ):
        try:
            return _Following(options, stop_request, root, output, link).run()
        except BaseException as error:
            if isinstance(error, HeadLostError):
                HostFile(options.run_dir, host_info, options.local_ranks).leave(error.cause)
            text = error.one_line() if isinstance(error, UpsError) else f"{type(error).__name__}: {error}"
            link.report({"state": "leaving", "leaving": text}, _LAST_WORDS_SECONDS)
            raise


class _Following:
    def __init__(
        self,
        options: Options,
        stop_request: StopRequest,
        box_root: Path,
        say: Callable[[str], None],
        link: FollowerLink,
    ) -> None:
        assert options.host_info is not None
        self._options, self._host, self._link = options, options.host_info, link
        self._stop_request, self._box_root, self._say = stop_request, box_root, say
        self._done = -1  # the last attempt that was run here
        self._report: dict[str, Any] = {"state": "waiting"}
        self._told_joined = False
        self._file = HostFile(options.run_dir, options.host_info, options.local_ranks)
        self._box_dir = box_root

    def run(self) -> int:
        self._tell(self._report)
        while True:
            order = self._link.order
            self._look([])
            what, number = order.get("what"), order.get("attempt")
            if what == "verdict":
                self._say(str(order.get("line", "")))
                return int(order.get("code", 1))
            if what == "begin" and type(number) is int and number > self._done:
                self._attempt(number, order)
            self._check_head()
            time.sleep(_POLL_SECONDS)

    def _attempt(self, number: int, order: dict[str, Any]) -> None:
        self._done = number
        self._tell({"attempt": number, "state": "running"})
        self._box_dir = box_dir = self._box_root / f"attempt_{number}"
        env = order.get("environment")
        known = {name: str(env[name]) for name in (IDENTITY_VARIABLE, HASHED_VARIABLE) if name in env} if env else {}
        options = replace(
            self._options,
            environment={**self._options.environment, **known},
            rendezvous=Rendezvous(str(order["address"]), int(order["port"]), self._host.interface),
        )
        overrides = {str(name): int(value) for name, value in dict(order.get("overrides", {})).items()}
        attempt = Attempt(
            options,
            number,
            box_dir,
            overrides,
            self._stop_request,
            self._slow,
            lambda entry: None,
            self._look,
            over_elsewhere=lambda: self._is_over(number),
        )
        outcome = attempt.run()
        keep_rings(self._options.run_dir, box_dir)
        shutil.rmtree(box_dir, ignore_errors=True)
        document = outcome_to_json(outcome, self._link.head_time_ns(0))
        self._tell({"attempt": number, "state": outcome.state, "outcome": document})
        if outcome.fault is not None:
            fault = outcome.fault
            # Host 0 says what is made of it, with all that it knows of the others.
            self._say(
                f"SEEN rank={fault.rank}/{fault.world} step={fault.step} phase={fault.phase} host={fault.host} "
                f"cause={fault.cause} at={fault.at} log={fault.log}"
            )

    def _look(self, views: list[RankView]) -> None:
        """Ten times a second: requests to leave, in both directions, and where the ranks are."""
        order = self._link.order
        if order.get("stop") and not self._stop_request.number:
            self._stop_request.number = int(order["stop"])
        self._stop_request.urgent = self._stop_request.urgent or order.get("urgent") is True
        if self._stop_request.number != self._report.get("asked", 0):
            self._tell({**self._report, "asked": self._stop_request.number})
        if views:
            self._file.look(self._box_dir)
        behind = least_advanced(view for view in views if view.alive)
        if behind:
            self._link.stand_at([behind[0].rank, *position(behind[0])])
        if self._link.joined and not self._told_joined:
            self._told_joined = True
            ranks = self._options.local_ranks
            self._say(
                f"JOINED {self._host.address}:{self._host.port} as host {self._host.label} of {self._host.count} "
                f"with ranks {ranks[0]} to {ranks[-1]} of {self._options.ranks}"
            )

    def _is_over(self, number: int) -> bool:
        order = self._link.order
        current = order.get("what") == "begin" and order.get("attempt") == number
        return not current or self._link.silent_seconds > self._options.deadlines.host_lost_seconds

    def _check_head(self) -> None:
        """Leave if the head stays away, or if the request to leave is urgent."""
        rules, link = self._options.deadlines, self._link
        where = f"{self._host.address}:{self._host.port}"
        if self._stop_request.number and (self._stop_request.urgent or not link.joined):
            raise SystemExit(exit_code_of_signal(self._stop_request.number))
        if not link.joined and link.silent_seconds > rules.host_join_seconds:
            raise HostLostError(
                f"host 0 did not come to {where} in {rules.host_join_seconds:.0f} s: {link.problem}",
                "0",
                hint="start host 0, and check --address and that both see the same run directory",
            )
        if link.joined and link.silent_seconds > rules.host_return_seconds:
            raise HeadLostError(
                f"host 0 was not heard at {where} for {link.silent_seconds:.0f} s: {link.problem}",
                hint="all ranks of this host were ended; see host 0, then start the same commands again",
            )

    def _slow(self, line: str) -> None:
        self._say(line)
        self._link.say(line)

    def _tell(self, report: dict[str, Any]) -> None:
        self._report = report
        self._link.report(report)
