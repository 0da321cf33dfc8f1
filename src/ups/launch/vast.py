"""The life of a machine at Vast: found below a price, made, watched, its results fetched, and destroyed on every path.

Whether it is gone is read from the list of all machines, not from the answer to a request. If none confirms that it is
gone, that is an error (`instance_left`) which names it. The program of the machine starts with a watchdog. It knows the
deadline, sees when the run has ended, and destroys the machine with the key that Vast gives to each of its machines
(CONTAINER_ID, CONTAINER_API_KEY). So the launcher may be killed.
"""

from __future__ import annotations

import base64
import lzma
import re
import secrets
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.errors import ConfigError, HostLostError, InstanceLeftError, MachineError, exit_code_of_signal
from ups.launch import job as common
from ups.launch.vast_client import VastClient, VastError, VastSilent
from ups.record.processes import handling, module_command
from ups.record.run_dir import RunDir

# What Vast takes as a start script.
MAX_CHARACTERS = 4048
# Shorter for texts than zlib or the usual settings of lzma.
_PACKING = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]
# After the end of the run: so long the launcher may fetch the results.
COLLECT_SECONDS = 600
# Where lines go that `vastai logs` shows.
OUTPUT = "/proc/1/fd/1"
_ENDED = re.compile(r"^UPS-LAUNCH ended code=(\d{1,3}) results=(yes|no)\s*$", re.MULTILINE)


def ended(log: str) -> tuple[int, bool] | None:
    """Exit code of the run and whether its results are in the bucket, if a log says so."""
    matches = _ENDED.findall(log)
    return (int(matches[-1][0]), matches[-1][1] == "yes") if matches else None


def onstart(machine: common.RentedJob) -> str:
    """The start script. Raises ConfigError if Vast would cut it."""
    texts = f"{watch(machine)}\0{job(machine)}".encode()
    packed = base64.b85encode(lzma.compress(texts, lzma.FORMAT_ALONE, filters=_PACKING)).decode()
    text = _START.replace("@PLACE", common.PLACE).replace("@PACKED", packed)
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"the start script has {len(text)} characters, and Vast takes {MAX_CHARACTERS}: the recipe is too long",
            hint="fewer tasks or stages, or another launcher",
        )
    return text


def watch(machine: common.RentedJob) -> str:
    """What destroys the machine: when its hours are over, or when the run has ended and was not fetched."""
    return _WATCH.replace("@DEADLINE", str(machine.deadline)).replace("@COLLECT", str(COLLECT_SECONDS))


def job(machine: common.RentedJob) -> str:
    """What is run, next to the watchdog."""
    words = ["run", common.RECIPE_NAME, "--ranks", str(machine.ranks), *common.changes(machine)]
    log = f'{machine.run_dir}/{RunDir.launch.name}/vast_"$CONTAINER_ID".log'
    lines = [
        f"output={OUTPUT}; [ -w $output ] || output=/dev/null",
        "exec > >(tee -a launch.log >> $output) 2>&1",
        "code=5",
        # Also where something before the run fails: the machine is not needed any more.
        'trap \'code=$?; echo; echo "UPS-LAUNCH ended code=$code results=${kept:-no}"; echo "$code" > "$HOME/'
        + common.PLACE
        + "/ended\"' EXIT",
        # One host: there is no InfiniBand to look for.
        "export NCCL_IB_DISABLE=1",
        *(f"export {shlex.quote(one)}" for one in machine.variables),
        'echo "UPS-LAUNCH install"',
        *common.setup(machine),
        'echo "UPS-LAUNCH run"',
        *common.fetch(machine),
        *common.run(machine, shlex.join(module_command("ups", *words, python="python3"))),
        f"mkdir -p {machine.run_dir}/{RunDir.launch.name} && cp launch.log {log}",
        *common.leave_results(machine),
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


# The key is in the environment, and on no command line. An image without Python is destroyed at once. What writes
# main.pid continues while the watchdog starts: a file that is still empty says nothing.
_START = r"""#!/usr/bin/env bash
# By `ups launch vast`: what destroys this machine, and its job.
set -u
export HOME="${HOME:-/root}"
mkdir -p "$HOME/@PLACE" && cd "$HOME/@PLACE" || exit 5
for name in CONTAINER_ID CONTAINER_API_KEY; do
  [ -n "${!name:-}" ] || export "$name=$(tr '\0' '\n' </proc/1/environ | sed -n "s/^$name=//p")"
done
export URL="${VAST_URL:-https://console.vast.ai}/api/v0/instances/$CONTAINER_ID/"
rm -f main.pid
python3 - <<'PACKED'
import base64, lzma
texts = lzma.decompress(base64.b85decode("@PACKED")).decode().split("\0")
for name, text in zip(("watch.sh", "job.sh"), texts): open(name, "w").write(text)
PACKED
until [ -s watch.sh ]; do
  printf 'header = "Authorization: Bearer %s"\n' "$CONTAINER_API_KEY" | curl -sfm 60 -K - -X DELETE "$URL"
  sleep 30
done
setsid nohup bash watch.sh >watch.log 2>&1 </dev/null &
[ -f ended ] && exit
setsid nohup bash job.sh >/dev/null 2>&1 </dev/null &
echo $! >main.pid
"""

_WATCH = r"""begun=$(date +%s) ended=
while :; do
  now=$(date +%s)
  if [ -z "$ended" ]; then
    if [ -f ended ]; then ended=$now
    elif [ -s main.pid ]; then kill -0 "$(cat main.pid)" 2>/dev/null || ended=$now
    elif [ $((now - begun)) -gt 60 ]; then ended=$now; fi
  fi
  if [ "$now" -ge @DEADLINE ] || { [ -n "$ended" ] && [ "$now" -ge $((ended + @COLLECT)) ]; }; then
    python3 - <<'PYTHON'
import os, urllib.request as u
key = {"Authorization": "Bearer " + os.environ["CONTAINER_API_KEY"], "Content-Type": "application/json"}
u.urlopen(u.Request(os.environ["URL"], b"{}", key, method="DELETE"), timeout=60)
PYTHON
    sleep 10
  else sleep 5; fi
done
"""


SCRIPT_NAME = "vast.sh"
NUM_OFFERS = 5
# With a driver for an older CUDA torch sees no GPU. This one is of torch from PyPI (2.11 and newer), which pip installs
# where the image has none, or an older one.
CUDA_VERSION = "13.0"
_TORCH_IMAGE = re.compile(r"pytorch:2\.(?:1[1-9]|[2-9]\d)\.\d+-cuda(\d+\.\d+)")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")


@dataclass(frozen=True)
class VastJob:
    """What is asked of Vast. gpus: KIND:COUNT in Vast's names, RTX_4090:1. disk: GB. label: by which it is found."""

    machine: common.RentedJob
    run_dir: Path
    gpus: str
    image: str
    disk: int = 50
    label: str = ""

    def __post_init__(self) -> None:
        if not common.num_gpus(self.gpus):
            raise ConfigError("a machine at Vast has GPUs", hint="--gpus RTX_4090:1")
        common.check_word("--image", self.image, _IMAGE, "pytorch/pytorch:TAG, with Python and torch")
        if not self.machine.mirror:
            raise ConfigError("the machine disappears with its checkpoints", hint="--mirror s3://bucket/prefix")
        if not self.label:
            object.__setattr__(self, "label", f"ups-{self.machine.name}-{secrets.token_hex(4)}")

    @property
    def script_path(self) -> Path:
        return RunDir(self.run_dir).launch / SCRIPT_NAME


@dataclass(frozen=True)
class Patience:
    """Seconds. start: until the machine runs. late: so old may an answer be that lacks a machine which exists."""

    poll: float = 20
    start: float = 1800
    lost: float = 600
    late: float = 60
    teardown: float = 300
    # Less than the machine waits for.
    copy: float = 400


@dataclass(frozen=True)
class RentalOutcome:
    """code: of the run on the machine. uploaded: its results are in the bucket. copied: where they are here, if so."""

    number: int
    code: int
    uploaded: bool
    copied: Path | None


def search_words(job: VastJob) -> list[str]:
    """The search for offers, cheapest first. The price holds the disk; what is sent and received costs extra."""
    kind, _, count = job.gpus.partition(":")
    named = _TORCH_IMAGE.search(job.image)
    query = (
        f"gpu_name={kind} num_gpus={count} dph_total<={job.machine.max_price:g} disk_space>={job.disk} "
        f"duration>={job.machine.max_hours / 24:.4f} reliability>=0.95 direct_port_count>=1 "
        f"cuda_vers>={named[1] if named else CUDA_VERSION}"
    )
    words = ["search", "offers", query, "--type", "on-demand", "--storage", str(job.disk)]
    return [*words, "--order", "dph_total", "--limit", str(NUM_OFFERS)]


def create_words(job: VastJob, offer: int | str) -> list[str]:
    """The request for a machine. It is never repeated by the client: a second one would be a second machine."""
    words = ["create", "instance", str(offer), "--image", job.image, "--disk", str(job.disk), "--label", job.label]
    return [*words, "--onstart", str(job.script_path), "--ssh", "--direct", "--cancel-unavail", "--retry", "1"]


def copy_words(job: VastJob, number: int | str, to: Path) -> list[str]:
    """The copy of the run directory. The container is root's, as Vast's are."""
    return ["copy", f"C.{number}:/root/{common.PLACE}/{job.machine.run_dir}/", str(to), "--retry", "1"]


def launch(
    job: VastJob, client: VastClient, tell: Callable[[str], None] = lambda line: None, patience: Patience | None = None
) -> RentalOutcome:
    """Rent a machine for the run and watch it to its end; the machine is gone when this returns or raises.

    Raises InstanceLeftError if that could not be made sure, HostLostError for a machine that went away by itself, and
    MachineError where there is none, or Vast does not answer.
    """
    client.require()
    common.write_script(job.run_dir, SCRIPT_NAME, onstart(job.machine))
    missing = set(job.machine.secrets) - client.secret_names()
    if missing:
        raise MachineError(
            f"the account at Vast has no variable {', '.join(sorted(missing))}",
            hint="make it on the page of keys and variables of the account, which gives it to every machine",
        )
    offers = [row for row in client.offers(search_words(job)) if _price(row) <= job.machine.max_price]
    if not offers:
        raise MachineError(
            f"Vast has no {job.gpus} with {job.disk} GB for {job.machine.max_hours:g} h below "
            f"{job.machine.max_price:g} dollars an hour",
            hint="another --gpus, a higher --max-price, or later",
        )
    life = _Life(job, client, tell, patience or Patience())
    with handling(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), _leave)):
        try:
            life.make(offers)
            outcome = life.watch()
        except BaseException as error:
            life.tear_down(error)
            raise
        life.tear_down(None)
    return outcome


class _Life:
    def __init__(self, job: VastJob, client: VastClient, tell: Callable[[str], None], patience: Patience) -> None:
        self._job = job
        self._client = client
        self._tell = tell
        self._patience = patience
        self._number: int | None = None
        # When a request was sent whose answer is not known.
        self._unclear: float | None = None
        self._last_line = ""

    def make(self, offers: list[dict[str, Any]]) -> None:
        """A machine from the first offer that is still there."""
        refused: VastError | None = None
        for offer in offers:
            # Until the answer is there: a signal may come in between.
            self._unclear = time.monotonic()
            try:
                self._number = self._client.create(create_words(self._job, offer["id"]))
            except VastSilent:
                self._unclear = time.monotonic()
                raise
            except VastError as error:
                self._unclear, refused = None, error
                continue
            self._unclear = None
            self._tell(f"machine {self._number} ({self._job.label}), {_price(offer):g} dollars an hour")
            return
        raise refused or VastError("Vast has no offer")

    def watch(self) -> RentalOutcome:
        """Until the run has ended, the machine is gone, or the hours are over."""
        number = self._number
        assert number is not None
        begun = seen = time.monotonic()
        runs, missed = False, 0.0
        while True:
            try:
                row = self._client.machine(number)
            except VastError as error:
                # The run continues without us, and the watchdog knows the hours.
                self._tell(f"{error.message}; asking again")
            else:
                status = row.get("actual_status") if row else None
                if row is None:
                    # One answer is not enough: it may be older than the machine.
                    missed = missed or time.monotonic()
                    if time.monotonic() - missed > self._patience.late:
                        raise self._lost(number, "gone, and how the run ended was not seen")
                elif "dph_total" in row and _price(row) > self._job.machine.max_price * 1.001:
                    raise MachineError(f"machine {number} costs {_price(row):g} dollars an hour, more than was said")
                else:
                    missed = 0.0
                if status == "running":
                    seen, runs = time.monotonic(), True
                    end = self._read_log(number)
                    if end is not None:
                        return self._collected(number, *end)
                elif row and runs and time.monotonic() - seen > self._patience.lost:
                    raise self._lost(number, f"'{status}' and not running")
            if not runs and time.monotonic() - begun > self._patience.start:
                raise MachineError(
                    f"machine {number} has not started within {self._patience.start / 60:g} minutes",
                    hint="see whether the image is right; another machine may be faster",
                )
            if time.time() > self._job.machine.deadline:
                raise MachineError(
                    "the hours are over",
                    hint=f"what was saved is in {self._job.machine.mirror}; the same command continues from there",
                )
            time.sleep(self._patience.poll)

    def _lost(self, number: int, how: str) -> HostLostError:
        hint = f"what it saved is in {self._job.machine.mirror}; the same command continues from there"
        return HostLostError(f"machine {number} is {how}", str(number), hint=hint)

    def tear_down(self, because: BaseException | None) -> None:
        """Destroy the machine and see that it is gone. Raises InstanceLeftError; signals wait meanwhile."""
        if self._number is None and self._unclear is None:
            return
        with handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN)):
            end, asked = time.monotonic() + self._patience.teardown, False
            while time.monotonic() < end:
                try:
                    # First by its number: a list may be older than the machine.
                    if not asked and self._number is not None:
                        self._ask_to_destroy(self._number)
                        asked = True
                    ours = [row for row in self._client.machines() if self._is_ours(row)]
                    for row in ours:
                        self._number = int(row["id"])
                        self._ask_to_destroy(self._number)
                    late = self._unclear is not None and time.monotonic() - self._unclear < self._patience.late
                    if not ours and not late:
                        return
                except VastError as error:
                    self._tell(f"{error.message}; asking again")
                time.sleep(min(self._patience.poll, 5))
        name = f"machine {self._number}" if self._number is not None else f"a machine with the label {self._job.label}"
        why = f"; before that: {because}" if isinstance(because, MachineError | HostLostError) else ""
        raise InstanceLeftError(
            f"{name} may still be there, and cost money: Vast did not say that it is gone{why}",
            hint=f"{self._client.program} show instances; {self._client.program} destroy instance "
            f"{self._number if self._number is not None else 'ID'}; it destroys itself at the latest after "
            f"{self._job.machine.max_hours:g} h, if it has started",
        )

    def _ask_to_destroy(self, number: int) -> None:
        """Raises VastSilent. What is refused may be gone already: the list of machines says so."""
        try:
            self._client.destroy(number)
        except VastSilent:
            raise
        except VastError as error:
            self._tell(error.message)

    def _is_ours(self, row: dict[str, Any]) -> bool:
        return isinstance(row.get("id"), int) and (
            row["id"] == self._number or (row.get("label") == self._job.label and bool(self._job.label))
        )

    def _read_log(self, number: int) -> tuple[int, bool] | None:
        try:
            text = self._client.log(number)
        except VastError:
            return None
        lines = [line for line in text.splitlines() if line.strip()]
        known = max((n for n, line in enumerate(lines) if line == self._last_line), default=-1)
        for line in lines[known + 1 :]:
            self._tell(line)
            self._last_line = line
        return ended(text)

    def _collected(self, number: int, code: int, uploaded: bool) -> RentalOutcome:
        """The results, copied next to the files that are here; results that were not copied are lost."""
        to = self._job.run_dir
        if RunDir(to).run_json.exists():
            to = to.with_name(f"{to.name}-vast-{number}")
        try:
            self._client.copy(copy_words(self._job, number, to), self._patience.copy)
        except VastError as error:
            self._tell(error.message)
        copied = to if RunDir(to).run_json.is_file() else None
        if copied is None and not uploaded:
            raise MachineError(
                f"the run on machine {number} ended with {code}, but its results could be brought nowhere",
                hint=f"its checkpoints are in {self._job.machine.mirror}; the same command continues from there",
            )
        return RentalOutcome(number, code, uploaded, copied)


def _price(row: dict[str, Any]) -> float:
    price = row.get("dph_total")
    return float(price) if isinstance(price, int | float) else float("inf")


def _leave(number: int, _frame: object) -> None:
    """A signal that ends a program is an exception here, so that the machine is destroyed first."""
    raise SystemExit(exit_code_of_signal(number))
