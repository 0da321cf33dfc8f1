"""The program of a machine at Vast: it is told to destroy itself before it is told to run anything.

The watchdog needs nobody: it knows the deadline, sees when the run has ended, and destroys the machine with the key
that Vast gives to each of its machines (CONTAINER_ID, CONTAINER_API_KEY). The launcher may be gone by then.
"""

from __future__ import annotations

import base64
import re
import shlex
import zlib

from ups.errors import ConfigError
from ups.launch.empty_machine import PLACE, RECIPE_NAME, EmptyMachine, changes, fetch, leave_results, run, setup
from ups.record.process_tree import module_command
from ups.record.run_dir import RunDir

# What Vast takes as a start script.
MAX_CHARACTERS = 4048
# After the end of the run: so long the launcher may fetch the results.
COLLECT_SECONDS = 600
# Where lines go that `vastai logs` shows.
OUTPUT = "/proc/1/fd/1"
_ENDED = re.compile(r"^UPS-LAUNCH ended code=(\d{1,3}) results=(yes|no)\s*$", re.MULTILINE)


def ended(log: str) -> tuple[int, bool] | None:
    """Exit code of the run and whether its results are in the bucket, if a log says so."""
    found = _ENDED.findall(log)
    return (int(found[-1][0]), found[-1][1] == "yes") if found else None


def onstart(machine: EmptyMachine) -> str:
    """The start script. Raises ConfigError if Vast would cut it."""
    packed = base64.b85encode(zlib.compress(f"{watch(machine)}\0{job(machine)}".encode(), 9)).decode()
    text = _START.replace("@PLACE", PLACE).replace("@PACKED", packed)
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"the start script has {len(text)} characters, and Vast takes {MAX_CHARACTERS}: the recipe is too long",
            hint="fewer tasks or stages, or another launcher",
        )
    return text


def watch(machine: EmptyMachine) -> str:
    """What destroys the machine: when its hours are over, or when the run has ended and nobody has fetched it."""
    return _WATCH.replace("@DEADLINE", str(machine.deadline)).replace("@COLLECT", str(COLLECT_SECONDS))


def job(machine: EmptyMachine) -> str:
    """What is run, next to the watchdog."""
    words = ["run", RECIPE_NAME, "--ranks", str(machine.ranks), *changes(machine)]
    log = f'{machine.run_dir}/{RunDir.launch.name}/vast_"$CONTAINER_ID".log'
    lines = [
        f"output={OUTPUT}; [ -w $output ] || output=/dev/null",
        "exec > >(tee -a launch.log >> $output) 2>&1",
        "code=5",
        # Also where something before the run fails: the machine is not needed any more.
        'trap \'code=$?; echo; echo "UPS-LAUNCH ended code=$code results=${kept:-no}"; echo "$code" > "$HOME/'
        + PLACE
        + "/ended\"' EXIT",
        # One host: there is no InfiniBand to look for.
        "export NCCL_IB_DISABLE=1",
        *(f"export {shlex.quote(one)}" for one in machine.variables),
        'echo "UPS-LAUNCH install"',
        *setup(machine),
        'echo "UPS-LAUNCH run"',
        *fetch(machine),
        *run(machine, shlex.join(module_command("ups", *words, python="python3"))),
        f"mkdir -p {machine.run_dir}/{RunDir.launch.name} && cp launch.log {log}",
        *leave_results(machine),
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


# The key is in the environment, and on no command line. An image without Python is destroyed at once. What writes
# main.pid goes on while the watchdog starts: a file that is still empty says nothing.
_START = r"""#!/usr/bin/env bash
# Written by `ups launch vast`: first what destroys this machine, then what it does; both are packed below.
set -u
export HOME="${HOME:-/root}"
mkdir -p "$HOME/@PLACE" && cd "$HOME/@PLACE" || exit 5
for name in CONTAINER_ID CONTAINER_API_KEY; do
  [ -n "${!name:-}" ] || export "$name=$(tr '\0' '\n' </proc/1/environ | sed -n "s/^$name=//p")"
done
export URL="${VAST_URL:-https://console.vast.ai}/api/v0/instances/$CONTAINER_ID/"
rm -f main.pid
python3 - <<'PACKED'
import base64, zlib
texts = zlib.decompress(base64.b85decode("@PACKED")).decode().split("\0")
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
