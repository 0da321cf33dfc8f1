"""The head of a run over several hosts: gathers them, starts each attempt on all, and finds out how it ended.

Its own ranks are watched by an `Attempt` as on one host; this file adds the others. A host is lost if its supervisor is
gone, or silent for longer than `Deadlines.host_lost_seconds`. Then, and after every other fault, the attempt ends on
all hosts before another one begins. Each host finds its own first cause. The first cause of the run is the first of
these on the head's clock; a host that only lost its peers reports a consequence, whatever its time.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import StrictStr, TypeAdapter, ValidationError

from ups.errors import HostLostError, exit_code_of_cause
from ups.record.causes import causes_first
from ups.record.run_dir import RunDir
from ups.record.text import printable
from ups.supervise.attempt import AttemptState, Outcome, StopRequest
from ups.supervise.fault import MAX_CONSEQUENCES, Fault, Whole
from ups.supervise.link_endpoints import HeadLink, Peer
from ups.supervise.options import Options, Rendezvous
from ups.supervise.status import HostFile
from ups.supervise.supervisor_process import STOP_SIGNALS

# Of each text of a fault: a frame of the link is bounded, and a message or a hint may be of any length.
_MAX_TEXT = 4000
_OUTCOMES = TypeAdapter(Outcome)
_POSITIONS = TypeAdapter(tuple[Whole, Whole, StrictStr])


def outcome_to_json(outcome: Outcome, offset_ns: int) -> dict[str, Any]:
    """What a host says about an attempt, short enough for a frame. `offset_ns`: the head's clock minus ours."""
    fault, outcome = outcome.fault, replace(outcome, time_ns=outcome.time_ns + offset_ns)
    if fault is not None:
        fault = replace(fault, consequences=[_cut(one) for one in fault.consequences[:MAX_CONSEQUENCES]])
    return {**asdict(replace(outcome, fault=None)), "fault": None if fault is None else _cut(fault.document())}


def outcome_from_json(document: object) -> Outcome | None:
    """What `outcome_to_json` gave; None for anything else: a peer may send whatever it likes."""
    try:
        outcome = _OUTCOMES.validate_python(document)
    except ValidationError:
        return None
    fault = outcome.fault
    if fault is None:
        return outcome
    if not all(isinstance(v, str | int | float | None) for one in fault.consequences for v in one.values()):
        return None  # it goes into run.json, whose depth is limited
    # With control characters escaped: a line break in a cause would print a second line, which may look like ours.
    texts = {name: value for name, value in fault.document().items() if isinstance(value, str)}
    shown: dict[str, Any] = {n: printable(text, "\n\t" if n == "message" else "") for n, text in texts.items()}
    return replace(outcome, fault=replace(fault, **shown))


def _cut(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value[:_MAX_TEXT] if isinstance(value, str) else value for key, value in document.items()}


def joined(outcomes: dict[int, Outcome], first_ranks: Sequence[int], training_wall: float | None) -> Outcome:
    """The outcome of the whole attempt. `outcomes`: by host; `first_ranks`: the first rank of each host."""
    last_step = max(outcome.last_step for outcome in outcomes.values())
    behind = next((outcome.behind for outcome in outcomes.values() if outcome.behind is not None), None)
    late = next((first_ranks[host] for host, one in sorted(outcomes.items()) if one.last_step < last_step), None)
    exits = {rank: code for one in outcomes.values() for rank, code in one.exits.items()}
    orphans = sum(one.orphans for one in outcomes.values())
    failed = causes_first(one for one in outcomes.values() if one.fault is not None)
    states = {one.state for one in outcomes.values()}
    state: AttemptState = "failed" if failed else "finished" if states == {"finished"} else "left"
    fault = _with_consequences(failed) if failed else None
    return Outcome(state, fault, last_step, exits, orphans, late if behind is None else behind, training_wall)


def _with_consequences(failed: Sequence[Outcome]) -> Fault:
    """The first cause, with what other hosts saw as its consequences."""
    first = failed[0].fault
    assert first is not None
    keys = ("rank", "host", "cause", "at", "step", "phase")
    others = [
        {key: getattr(one.fault, key) for key in keys}
        | {"time_monotonic_ns": one.time_ns, "message": one.fault.message[:500]}
        for one in failed[1:]
        if one.fault is not None
    ]
    return replace(first, consequences=[*first.consequences, *others][:MAX_CONSEQUENCES])


# A connection that was closed by the other side is made again at once, if there is anybody who can.
_CLOSED_SECONDS = 5.0
# Where one host reports only consequences, another one most likely has the cause and is about to report it.
_CAUSE_SECONDS = 3.0
_GOODBYE_SECONDS = 5.0
_DISMISS_SECONDS = 30.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Lost:
    """Why a host counts as lost, and since when by the head's clock."""

    why: str
    time_ns: int


class Head:
    """Speaks for host 0. `find_commit` gives the step from which a restart would go on; `notice` keeps a line."""

    def __init__(
        self,
        options: Options,
        link: HeadLink,
        stop_request: StopRequest,
        say: Callable[[str], None],
        find_commit: Callable[[], int | None],
        notice: Callable[[dict[str, Any]], None],
    ) -> None:
        assert options.host_info is not None
        self._options, self._host, self._link = options, options.host_info, link
        self._stop_request, self._say, self._find_commit, self._notice = stop_request, say, find_commit, notice
        self._number = -1
        self._order: dict[str, object] = {}
        self._incarnations: dict[int, str] = {}
        self._told_end = False
        self._cascade_since = 0.0
        self._file = HostFile(options.run_dir, options.host_info, options.local_ranks)

    def labels(self) -> list[str]:
        """All hosts of the run, in their order."""
        return [self._host.label, *(peer.label for peer in self._link.peers().values())]

    def gather(self, first: bool) -> bool:
        """Wait until every host is there and has no rank left. False if the run was asked to leave before that.

        Raises HostLostError for a host that does not come (`first`), or does not come back.
        """
        rules = self._options.deadlines
        seconds = rules.host_join_seconds if first else rules.host_return_seconds
        began, announced = time.monotonic(), False
        while True:
            peers = self._link.peers()
            missing = {number: peer for number, peer in peers.items() if not self._is_ready(peer)}
            if not missing:
                self._incarnations = {number: peer.incarnation for number, peer in peers.items()}
                return True
            self.look()
            waited = time.monotonic() - began
            if self._stop_request.number:
                return False
            names = ", ".join(peer.label for peer in missing.values())
            if waited > seconds:
                number = min(missing)
                come = "come" if first else "come back"
                raise HostLostError(
                    f"host {names} did not {come} to {self._host.address}:{self._host.port} in {seconds:.0f} s",
                    peers[number].label,
                    hint="start the same command there, with its own --host, and see what it says",
                )
            if waited > 2.0 and not announced:
                announced = True
                self._say(f"WAITING for host {names} at {self._host.address}:{self._host.port}")
            time.sleep(_POLL_SECONDS)

    def begin(self, number: int, overrides: Mapping[str, int], environment: Mapping[str, str]) -> Rendezvous:
        """Start an attempt on all other hosts; returns where its ranks meet."""
        host_info = self._host
        with socket.create_server((host_info.address, 0)) as free:
            port = free.getsockname()[1]
        self._number, self._told_end, self._cascade_since = number, False, 0.0
        self._order = {"what": "begin", "attempt": number, "address": host_info.address, "port": port}
        self._order |= {"overrides": dict(overrides), "environment": dict(environment)}
        self._tell()
        return Rendezvous(host_info.address, port, host_info.interface)

    def look(self, box_dir: Path | None = None) -> None:
        """Pass requests to leave on, in both directions, and keep what other hosts say.

        box_dir: of the ranks of this host, of which a summary is left for readers on the others.
        """
        if box_dir is not None:
            self._file.look(box_dir)
        for line in self._link.take_notes():
            self._say(line)
            self._notice({"time": time.time(), "line": line})
        for peer in self._link.peers().values():
            asked = peer.report.get("asked")
            if type(asked) is int and asked in STOP_SIGNALS and not self._stop_request.number:
                self._stop_request.number = asked
        self._tell()

    def over(self) -> bool:
        """Whether the attempt is over on another host: something failed there, or the host is lost."""
        reported, lost = self._reports()
        if lost:
            return True
        failed = [one for one in reported.values() if one.state in ("failed", "ended")]
        if not failed:
            return False
        if all(one.cascade for one in failed):
            self._cascade_since = self._cascade_since or time.monotonic()
            return time.monotonic() - self._cascade_since > _CAUSE_SECONDS
        return True

    def join(self, own: Outcome) -> Outcome:
        """Wait until the attempt has ended on every host, and say how. Raises nothing: who stays away is a fault.

        So is who answers and never says how its ranks ended: its supervisor may wait for a dead file system.
        """
        began = time.monotonic()
        while True:
            self.look()
            reported, lost = self._reports()
            waited = time.monotonic() - began
            if waited > self._report_seconds():
                silent_ones = self._link.peers().keys() - reported.keys() - lost.keys()
                late = _Lost(f"it answers, but has not said in {waited:.0f} s how its ranks ended", time.monotonic_ns())
                lost |= dict.fromkeys(silent_ones, late)
            outcomes = {0: own, **reported}
            failed = [one for one in outcomes.values() if one.state in ("failed", "ended")]
            certain = bool(lost) or any(not one.cascade for one in failed)
            if (failed or lost) and (certain or time.monotonic() - began > _CAUSE_SECONDS):
                self._end()
            if len(reported) + len(lost) == self._host.count - 1:
                break
            time.sleep(_POLL_SECONDS)
        peers = self._link.peers()
        for number, why in lost.items():
            outcomes[number] = self._lost_outcome(number, peers[number], why)
        silent = next((number for number, one in reported.items() if one.state == "ended"), None)
        if silent is not None and all(one.fault is None for one in outcomes.values()):
            # It was not told to end, and nothing failed anywhere: only the way from here to there was cut.
            why = _Lost("it ended its ranks because it did not hear host 0 any more", time.monotonic_ns())
            outcomes[silent] = self._lost_outcome(silent, peers[silent], why)
        self._end()
        shares = [self._host.ranks_of(number, self._options.ranks)[0] for number in range(self._host.count)]
        result = joined(outcomes, shares, own.training_wall)
        if result.fault is None:
            return result
        # After the ranks of all hosts are gone: until then another commit may come.
        return replace(result, fault=result.fault.continued_from(self._find_commit()))

    def _report_seconds(self) -> float:
        """How long after the end on this host another one may say nothing about its own."""
        rules = self._options.deadlines
        if self._stop_request.urgent:
            return rules.host_lost_seconds
        # Where nothing failed, ranks of another host may still be in a save that everybody waits for.
        return rules.host_lost_seconds + (rules.grace_seconds if self._told_end else rules.leave_seconds)

    def pronounce(self, line: str, code: int) -> None:
        """Tell all hosts the verdict, and give them a moment to leave."""
        self._order = {"what": "verdict", "attempt": self._number, "line": line, "code": code}
        self._tell()
        deadline = time.monotonic() + _GOODBYE_SECONDS
        while any(peer.session for peer in self._link.peers().values()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _tell(self) -> None:
        # Both are in every order: who comes late learns of a request, too.
        stop = {"stop": self._stop_request.number, "urgent": self._stop_request.urgent}
        self._link.tell({**self._order, **stop})

    def _end(self) -> None:
        if not self._told_end:
            self._told_end = True
            self._order = {"what": "end", "attempt": self._number}
            self._tell()

    def _is_ready(self, peer: Peer) -> bool:
        """Whether a host is there, heard lately, and not busy with an attempt."""
        silent = time.monotonic() - peer.heard > self._options.deadlines.host_lost_seconds
        return peer.session is not None and not silent and peer.report.get("state") not in (None, "running")

    def _reports(self) -> tuple[dict[int, Outcome], dict[int, _Lost]]:
        """What other hosts say about how this attempt ended there, and which of those that say nothing are lost."""
        reported, lost = {}, {}
        for number, peer in self._link.peers().items():
            current = peer.report.get("attempt") == self._number and peer.incarnation == self._incarnations.get(number)
            outcome = outcome_from_json(peer.report.get("outcome")) if current else None
            if outcome is not None:
                reported[number] = outcome
            elif (why := self._why_lost(number, peer)) is not None:
                lost[number] = why
        return reported, lost

    def _why_lost(self, number: int, peer: Peer) -> _Lost | None:
        now, patience = time.monotonic(), self._options.deadlines.host_lost_seconds
        leaving = peer.report.get("leaving")
        if isinstance(leaving, str):
            return _Lost(f"its supervisor left: {leaving[:500]}", int(peer.heard * 1e9))
        if peer.incarnation != self._incarnations.get(number):
            return _Lost("its supervisor is gone, and another one came in its place", int(peer.heard * 1e9))
        if peer.session is None and peer.closed and now - peer.closed > _CLOSED_SECONDS:
            return _Lost("its supervisor is gone: the connection was closed there", int(peer.closed * 1e9))
        if now - peer.heard > patience:
            return _Lost(f"nothing was heard from it for {now - peer.heard:.0f} s", int(peer.heard * 1e9))
        return None

    def _lost_outcome(self, number: int, peer: Peer, lost: _Lost) -> Outcome:
        ranks = self._host.ranks_of(number, self._options.ranks)
        rank, step, phase = ranks[0], 0, "init"
        with contextlib.suppress(ValidationError):
            rank, step, phase = _POSITIONS.validate_python(peer.position)
            rank = rank if rank in ranks else ranks[0]
        seconds = time.monotonic() - lost.time_ns / 1e9
        fault = Fault(
            attempt=self._number,
            rank=rank,
            world=self._options.ranks,
            host=peer.label,
            step=step,
            phase=phase[:20],
            cause=f"host_lost({peer.label})",
            log=RunDir.log_name(self._number, rank),
            message=f"{lost.why}; rank {rank} was last seen there",
            exit_code=exit_code_of_cause("host_lost"),
            time_wall=time.time() - seconds,
            noticed_after_seconds=round(seconds, 3),
        )
        return Outcome("failed", fault, step, time_ns=lost.time_ns)


def dismiss(link: HeadLink, line: str, code: int) -> None:
    """Send all hosts home without an attempt: each that comes within half a minute."""
    link.tell({"what": "verdict", "attempt": -1, "line": line, "code": code})
    deadline = time.monotonic() + _DISMISS_SECONDS
    while time.monotonic() < deadline and any(p.session or not p.heard for p in link.peers().values()):
        time.sleep(_POLL_SECONDS)
