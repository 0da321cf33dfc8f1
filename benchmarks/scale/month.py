"""A month of training under failures, simulated event by event: `python benchmarks/scale/month.py` (some minutes).

First the simulator is compared with what others and we have measured or published. Then it answers three questions for
1,024 GPUs: how often to save, when spare hosts pay off, and when a cold restart of all ranks is wrong. The last line is
one JSON object; the exit code is 1 if a comparison misses its bar.

A run trains, saves and fails. Work since the last complete checkpoint is lost with a fault. A fault may take its host
away, or all hosts behind one switch: the run then waits for spare hosts, repaired ones or new ones. Bad hosts fail more
often until a repair cures them. A host may become slow, and slows all others until it is replaced. A silent corruption
is found late, and everything since then is lost. Faults also strike while ranks start.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ups.plan.devices import HOURS_BETWEEN_FAILURES, effective_part, young_interval

HOUR, DAY = 3600.0, 86400.0
# Meta's research clusters (arXiv 2410.21680): 7.9 h between failures of a job of 1,024 GPUs.
RSC_HOURS = 7.9 * 1024


@dataclass(frozen=True)
class Case:
    """A run and its machines. Times in seconds unless a name says otherwise.

    hours_between: faults of one GPU. notice: from a fault until the ranks are ended; `hangs` of the faults only stop a
    rank and are noticed after `hang_notice`. start: until all ranks train again. save: how long the loop stops for
    one; write: until it is complete, while training continues. interval: of training between saves; 0 loses no work.
    lost_hosts: part of the faults after which the host is not used again; `switches` of those take `switch_hosts`.
    replace: until a host comes from outside, once no spare is left. bad: part of all hosts, which fail `bad_factor`
    times as often until one of their repairs, of which `cured` succeed. corrupt: part of the faults that are silent and
    are found only after `corrupt_hours`. slow_hours: of one host until it is slow; the run then has `slow_speed` until
    it is replaced, after `slow_notice`. fix: part of the faults that need `fix_seconds` of people's time.
    """

    gpus: int
    hours_between: float = HOURS_BETWEEN_FAILURES
    gpus_per_host: int = 8
    notice: float = 0.1
    hangs: float = 0.0
    hang_notice: float = 60.0
    start: float = 120.0
    save: float = 0.0
    write: float = 0.0
    interval: float = 0.0
    lost_hosts: float = 0.0
    spares: int = 0
    replace: float = HOUR
    repair_hours: tuple[float, ...] = (24.0,)
    switches: float = 0.0
    switch_hosts: int = 16
    bad: float = 0.0
    bad_factor: float = 1.0
    cured: float = 1.0
    corrupt: float = 0.0
    corrupt_hours: float = 2.0
    slow_hours: float = math.inf
    slow_speed: float = 0.8
    slow_notice: float = 600.0
    fix: float = 0.0
    fix_seconds: float = 0.0
    strikes_at_start: bool = True

    @property
    def hosts(self) -> int:
        return self.gpus // self.gpus_per_host

    @property
    def failure_seconds(self) -> float:
        """Mean time between faults of the run, without bad hosts."""
        return self.hours_between * HOUR / self.gpus


class Run:
    """One run of a case, until `goal` seconds of work are done and kept."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.dice = case, random.Random(seed)
        self.now = self.work = self.kept = 0.0
        self.saved: tuple[float, float] | None = (
            None  # work in a checkpoint that is being written, and when it is complete
        )
        self.bad_active = sum(self.dice.random() < case.bad for _ in range(case.hosts))
        self.idle = [self.dice.random() < case.bad for _ in range(case.spares)]  # spare hosts: whether each is bad
        self.repairs: list[tuple[float, bool]] = []
        self.slow = False
        self.counts: Counter[str] = Counter()
        self.spent: defaultdict[str, float] = defaultdict(float)

    def until(self, goal: float) -> float:
        """Part of the time that is work which lasts."""
        case = self.case
        clocks = {"fault": self._next_fault(), "slow": self._next_slow(), "save": case.interval or math.inf}
        clocks |= {"found": math.inf, "slow found": math.inf}
        clean = 0.0  # work in the newest checkpoint from before a corruption
        while True:
            # Work in a whole interval is done at the pace of the slowest host.
            pace = case.slow_speed if self.slow else 1.0
            clocks["end"] = self.now + (goal - self.work) / pace
            event = min(clocks, key=lambda name: clocks[name])
            self._train(clocks[event] - self.now, pace)
            if event == "end":
                return goal / self.now
            self.counts[event] += 1
            if event == "save":
                self._complete()
                self._pass("saves", case.save)
                self.saved = (self.work, self.now + case.write)
                clocks["save"] = self.now + case.interval
                clocks["fault"] = max(clocks["fault"], self.now)
                continue
            if event == "slow":
                self.slow, clocks["slow"], clocks["slow found"] = True, math.inf, self.now + case.slow_notice
                continue
            if event == "fault" and self.dice.random() < case.corrupt:
                self._complete()
                clean = min(clean, self.kept) if clocks["found"] < math.inf else self.kept
                clocks["found"] = min(
                    clocks["found"], self.now + self.dice.expovariate(1 / (case.corrupt_hours * HOUR))
                )
                clocks["fault"] = self._next_fault()
                continue
            self._complete()
            if event == "found":
                self.kept = min(self.kept, clean)
                clocks["found"] = math.inf
            self._restart(event)
            clocks |= {"fault": self._next_fault(), "save": self.now + (case.interval or math.inf)}
            if self.slow and event == "slow found":
                self.slow, clocks["slow found"], clocks["slow"] = False, math.inf, self._next_slow()

    def _restart(self, event: str) -> None:
        """From a fault until training: what is lost, who is replaced, and how long it takes."""
        case, dice = self.case, self.dice
        if case.interval:
            self.spent["lost work"] += self.work - self.kept
            self.work = self.kept
        self.saved = None
        hang = event == "fault" and dice.random() < case.hangs
        self._pass("notice", case.hang_notice if hang else case.notice)
        if case.fix and dice.random() < case.fix:
            self._pass("fix", case.fix_seconds)
        if event == "slow found" or dice.random() < case.lost_hosts:
            behind_switch = event == "fault" and dice.random() < case.switches
            for _ in range(min(case.switch_hosts, case.hosts) if behind_switch else 1):
                self._lose_host()
            self._pass("hosts", self._replacement())
        left = case.start
        while case.strikes_at_start and (strike := self._next_fault() - self.now) < left:
            self.counts["fault"] += 1
            self._pass("start", strike + case.notice)
        self._pass("start", left)

    def _lose_host(self) -> None:
        case = self.case
        weight = self.bad_active * case.bad_factor
        bad = self.dice.random() < weight / (weight + case.hosts - self.bad_active)
        self.bad_active -= bad
        hours = self.dice.choice(case.repair_hours)
        heapq.heappush(self.repairs, (self.now + hours * HOUR, bad and self.dice.random() >= case.cured))
        self.counts["hosts lost"] += 1

    def _replacement(self) -> float:
        """Seconds until the run has all of its hosts again."""
        case, ready = self.case, self.now
        while self.repairs and self.repairs[0][0] <= self.now:
            self.idle.append(heapq.heappop(self.repairs)[1])
        for _ in range(int(self.counts["hosts lost"] - self.counts["hosts back"])):
            if self.idle:
                self.bad_active += self.idle.pop(self.dice.randrange(len(self.idle)))
            elif self.repairs and self.repairs[0][0] <= self.now + case.replace:
                ready = max(ready, self.repairs[0][0])
                self.bad_active += heapq.heappop(self.repairs)[1]
            else:  # from outside: the repaired one is given back
                ready = max(ready, self.now + case.replace)
                self.bad_active += self.dice.random() < case.bad
                if self.repairs:
                    self.repairs.pop()
                    heapq.heapify(self.repairs)
            self.counts["hosts back"] += 1
        return ready - self.now

    def _train(self, seconds: float, pace: float) -> None:
        self.now += seconds
        self.work += seconds * pace
        self.spent["slow host"] += seconds * (1 - pace)

    def _complete(self) -> None:
        """The checkpoint that was being written counts if it is complete by now."""
        if self.saved is not None and self.saved[1] <= self.now:
            self.kept, self.saved = self.saved[0], None

    def _pass(self, what: str, seconds: float) -> None:
        self.now += seconds
        self.spent[what] += seconds

    def _next_fault(self) -> float:
        case = self.case
        weight = case.hosts + self.bad_active * (case.bad_factor - 1)
        return self.now + self.dice.expovariate(weight / case.hosts / case.failure_seconds)

    def _next_slow(self) -> float:
        hours = self.case.slow_hours
        return math.inf if math.isinf(hours) else self.now + self.dice.expovariate(self.case.hosts / (hours * HOUR))


def effective(case: Case, days: float = 30.0, times: int = 20, seed: int = 1) -> tuple[float, float, dict[str, float]]:
    """Mean and standard error of the effective part over `times` runs, and the mean seconds of each loss."""
    runs = [Run(case, seed * 1000 + number) for number in range(times)]
    parts = [run.until(days * DAY) for run in runs]
    spent: defaultdict[str, float] = defaultdict(float)
    for run in runs:
        for name, seconds in (*run.spent.items(), *run.counts.items()):
            spent[name] += seconds / times
    return statistics.fmean(parts), statistics.stdev(parts) / math.sqrt(times), spent


# Two ranks under `benchmarks/faults/chaos.py --minutes 17`: faults every 60 s on average once ranks train, one kind in
# five stops a rank (10 s); 50 steps of 1/30 s between saves; a restart took 6 s (docs/fault-matrix.md).
CHAOS = Case(
    2, 2 * 60 / HOUR, gpus_per_host=2, hangs=0.2, hang_notice=10.0, start=6.0, interval=1.67, strikes_at_start=False
)
# 419 interruptions in 54 days on 16,384 GPUs; more than 90 % was published. The rest is not, so assumed: saves as often
# as Young says for a stop of 5 s, 10 minutes from a fault to training, a new host from a large pool after half of the
# faults. 1.4 % of the faults were silent corruption.
LLAMA = Case(
    16384, hangs=0.1, hang_notice=300.0, start=600.0, save=5.0, write=60.0, interval=334.0, lost_hosts=0.5,
    spares=64, corrupt=0.014, corrupt_hours=1.0,
)  # fmt: skip
# Dense job (arXiv 2509.16293, tables 4, 6, 8 and section 8.1.3): 175 incidents in 90 days on 9,600 GPUs, 143 of them
# with an eviction, 15 found by analysis of stacks (assumed: 10 minutes), 12 rollbacks (4,289 s on average, as for NaN),
# 93 s from localization to training, warm standbys, a checkpoint in every step that costs 0.9 % of the speed.
BYTEROBUST = Case(
    9600, 9600 * 90 * 24 / 175, 16, notice=30.0, hangs=15 / 175, hang_notice=600.0, start=93.0, save=0.09,
    interval=10.0, lost_hosts=143 / 175, spares=4, replace=600.0, fix=12 / 175, fix_seconds=4289.0,
)  # fmt: skip
# Defaults of AIReSim (arXiv 2603.07041, table 1) and the report of 2026-09-20 in its repository: 20 minutes for each
# fault, no work lost, 4,096 servers with 0.01 faults a day, 15 % of them 6 times as often, 264 spares. A repair takes 2
# hours, or 2 days more for 32 %, and cures 85.7 %.
AIRESIM = Case(
    4096, 2400.0, 1, notice=0.0, start=1200.0, lost_hosts=1.0, spares=264, repair_hours=(2.0, 2.0, 50.0),
    bad=0.15, bad_factor=6.0, cured=0.857, strikes_at_start=False,
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    name: str
    case: Case
    days: float
    published: float
    least: float
    most: float


COMPARISONS = [
    Comparison("our chaos run", CHAOS, 1194 / DAY, 0.88, 0.83, 0.93),
    Comparison("Llama 3", LLAMA, 54, 0.90, 0.90, 1.0),
    Comparison("ByteRobust, dense job", BYTEROBUST, 90, 0.97, 0.92, 1.0),
    Comparison("AIReSim, defaults", AIRESIM, 256, 0.625, 0.575, 0.675),
]


def compare() -> Iterator[dict[str, object]]:
    """Each published or measured figure beside the simulated one."""
    print(f"{'compared with':24} {'published':>9} {'simulated':>9}   bar")
    for one in COMPARISONS:
        part, error, _ = effective(one.case, one.days, 40 if one.days < 1 else 5)
        good = one.least <= part <= one.most
        print(f"{one.name:24} {one.published:9.3f} {part:9.3f}   {one.least} to {one.most} {'' if good else 'MISSED'}")
        yield {"name": one.name, "published": one.published, "simulated": part, "error": error, "kept": good}


# A month on 128 hosts of 8 GPUs. Measured of ours: 0.1 s to notice a death; a rank that stands still is ended after 60
# s (docs/fault-sweep.md). All else is assumed, start-up of 128 hosts too.
MONTH = Case(
    1024, hangs=0.1, hang_notice=60.0, start=120.0, save=2.0, write=30.0, interval=600.0, lost_hosts=0.5, replace=HOUR,
    switches=0.01, bad=0.02, bad_factor=10.0, cured=0.8, corrupt=0.014, slow_hours=8760.0,
)  # fmt: skip
RATES = {"Llama": HOURS_BETWEEN_FAILURES, "RSC": RSC_HOURS}


def best_interval(case: Case, seed: int) -> float:
    """The interval of the least loss: a parabola through the losses over the logarithm of the interval."""
    young = young_interval(case.save, case.failure_seconds)
    grid = [young * 2 ** (step / 2) for step in range(-3, 4)]
    days = 500 * case.failure_seconds / DAY
    losses = [1 - effective(replace(case, interval=at), days, 2, seed)[0] for at in grid]
    # What a save costs falls with the interval, what a fault costs rises with it: a / t + b t + c.
    a, _, b = fit([[1 / t, 1.0, t] for t in grid], losses)
    return math.sqrt(a / b)


def fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Least squares, by the normal equations of columns that are scaled to size 1."""
    import numpy as np

    columns = np.array(rows)
    size = np.abs(columns).max(0)
    return [float(x) for x in np.linalg.lstsq(columns / size, np.array(values), rcond=None)[0] / size]


def intervals() -> Iterator[dict[str, object]]:
    """The best interval beside Young's, first where his assumptions hold, then with all that can happen."""
    print("\nhow often to save: minutes of training between saves")
    print(f"{'rate':6} {'save':>5} {'Young':>6} {'simulated':>9} {'ratio':>6} {'effective':>9} {'Daly':>6}")
    for name, hours in RATES.items():
        for save in (2.0, 30.0):
            plain = Case(1024, hours, start=120.0, notice=0.0, save=save)
            young, best = young_interval(save, plain.failure_seconds), best_interval(plain, 3)
            days = 500 * plain.failure_seconds / DAY
            part = effective(replace(plain, interval=young), days, 2)[0]
            daly = effective_part(young, save, plain.start, plain.failure_seconds)
            print(
                f"{name:6} {save:4.0f}s {young / 60:6.1f} {best / 60:9.1f} {best / young:6.2f} {part:9.4f} {daly:6.4f}",
                flush=True,
            )
            yield {"rate": name, "save": save, "young": young, "best": best, "effective": part, "daly": daly}


def months() -> Iterator[dict[str, object]]:
    """What the month loses, and to what."""
    print("\na month on 1,024 GPUs, no spares: hours lost of 720")
    names = ("lost work", "hosts", "start", "notice", "saves", "slow host")
    print(f"{'rate':6} {'effective':>9} {'faults':>7} " + " ".join(f"{name:>9}" for name in names))
    for rate, hours in RATES.items():
        case = replace(MONTH, hours_between=hours)
        case = replace(case, interval=young_interval(case.save, case.failure_seconds))
        part, error, spent = effective(case)
        lost = {name: spent[name] / HOUR for name in names}
        print(f"{rate:6} {part:9.3f} {spent['fault']:7.1f} " + " ".join(f"{x:9.1f}" for x in lost.values()))
        yield {"rate": rate, "effective": part, "error": error, "faults": spent["fault"], "lost_hours": lost}


def spares() -> Iterator[dict[str, object]]:
    """Whether idle hosts bring more than the hours of work that they could do themselves."""
    print("\nspare hosts: gain of training by each spare beside what it costs (1/128 = 0.8 %)")
    print(f"{'rate':6} {'new host after':>14} " + " ".join(f"{n:>2} spares" for n in (0, 1, 2, 4, 8)) + "   best")
    for rate, hours in RATES.items():
        for wait in (300.0, HOUR, 4 * HOUR, DAY):
            base = replace(MONTH, hours_between=hours, replace=wait)
            base = replace(base, interval=young_interval(base.save, base.failure_seconds))
            parts = {n: effective(replace(base, spares=n))[0] for n in (0, 1, 2, 4, 8)}
            per_host = {n: part * base.hosts / (base.hosts + n) for n, part in parts.items()}
            best = max(per_host, key=lambda n: per_host[n])
            row = " ".join(f"{part:9.3f}" for part in parts.values())
            print(f"{rate:6} {wait / 60:10.0f} min {row}   {best}", flush=True)
            yield {"rate": rate, "replace": wait, "effective": parts, "best": best}


def restarts() -> Iterator[dict[str, object]]:
    """What cold restarts cost by number of GPUs and seconds of a start; in place: one step and 20 s instead."""
    starts = (30.0, 120.0, 300.0, 900.0)
    print(
        "\ncold restarts: part of the time that is lost to faults, by seconds of a start (rate of RSC, spares at hand)"
    )
    print(f"{'GPUs':>6} " + " ".join(f"{start:5.0f} s" for start in starts) + "   in place")
    for gpus in (8, 64, 1024, 4096, 16384):
        plain = Case(gpus, RSC_HOURS, save=2.0, write=30.0, hangs=0.1)
        plain = replace(plain, interval=young_interval(plain.save, plain.failure_seconds))
        days = max(30.0, 300 * plain.failure_seconds / DAY)
        lost = [1 - effective(replace(plain, start=start), days, 4)[0] for start in starts]
        in_place = 1 - effective(replace(plain, start=20.0, interval=0.0), days, 4)[0]
        print(f"{gpus:6} " + " ".join(f"{100 * x:6.2f}%" for x in lost) + f"   {100 * in_place:.2f}%", flush=True)
        yield {"gpus": gpus, "starts": starts, "lost": lost, "in_place": in_place}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["compare", "intervals", "months", "spares", "restarts"])
    chosen = parser.parse_args().only
    parts = {"compare": compare, "intervals": intervals, "months": months, "spares": spares, "restarts": restarts}
    found = {name: list(part()) for name, part in parts.items() if chosen in (None, name)}
    good = all(row["kept"] for row in found.get("compare", []))
    good &= all(abs(row["best"] / row["young"] - 1) <= 0.2 for row in found.get("intervals", []))  # type: ignore[operator]
    print(json.dumps(found | {"kept": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
