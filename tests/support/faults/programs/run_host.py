"""`python run_host.py SETTINGS PROGRAM MARK`: the supervisor of one host of several, as a process to be killed."""

import json
import sys
from pathlib import Path

from ups.errors import UpsError
from ups.supervise.follower import follow
from ups.supervise.link_endpoints import head_link
from ups.supervise.options import Options, find_host_info
from ups.supervise.run_file import hold_run
from ups.supervise.standstill import Deadlines
from ups.supervise.supervisor import supervise


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    settings = json.loads(sys.argv[1])
    run_dir, ranks = Path(settings["run_dir"]), settings["ranks"]
    host_info = find_host_info(settings["hosts"], ranks, settings["host"], settings["address"], "")
    options = Options(
        run_dir,
        ranks,
        (sys.executable, sys.argv[2], str(run_dir)),
        max_restarts=settings["max_restarts"],
        deadlines=Deadlines(**settings["deadlines"]),
        environment={"TOY_MARK": sys.argv[3]},
        show_rank=None,
        host_info=host_info,
    )
    if not host_info.is_head:
        return follow(options, say, "test")
    with hold_run(run_dir), head_link(host_info, ranks, "test", run_dir) as link:
        return supervise(options, say, link)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UpsError as error:
        say(f"ERROR {error.one_line()}")
        sys.exit(error.exit_code)
