"""A machine at Vast: it is gone on every path, or it is named; no secret leaves its own field.

The server is a stand-in on loopback whose machines are real processes. The client is a stand-in, too, and the real one
where UPS_VASTAI names it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import vastai_program
from tests.support.vast_server import VastServer, processes_below, serve
from tests.unit.launch.test_job import machine
from ups.errors import ConfigError, HostLostError, InstanceLeftError, MachineError
from ups.launch import vast
from ups.launch.job import NAMES
from ups.launch.vast import MAX_CHARACTERS, Patience, RentalOutcome, VastJob, ended, launch, onstart, search_words
from ups.launch.vast_client import VastClient, VastError, VastSilent

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

REAL = os.environ.get("UPS_VASTAI", "")
ACCOUNT_KEY = "canary-account-key"
SECRETS = {"WANDB_API_KEY": "canary-wandb", "AWS_SECRET_ACCESS_KEY": "canary-s3"}
# Of the stand-in where it gets no answer. Other calls may take longer: a busy host takes its time to start a program.
HANGING_SECONDS = 20
# In place of Python on a machine: installs nothing, and the run does what RUN_CODE and RUN_HANGS say.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-") exec {python} - ;;
  "-P -m ups run"*)
    mkdir -p runs/waves; echo '{{}}' > runs/waves/run.json; echo "step 1 of 2"
    if [ "${{RUN_HANGS:-}}" = deaf ]; then trap '' TERM; sleep 300; fi
    if [ -n "${{RUN_HANGS:-}}" ]; then trap 'exit 143' TERM; sleep 300 & wait; fi
    exit "${{RUN_CODE:-0}}" ;;
esac
"""
# In place of rsync: the machine's files are on this host.
RSYNC = """#!/usr/bin/env bash
from="${{@: -2:1}}"; from="${{from#*::C.}}"
cp -r "{folder}/machine-${{from%%/*}}/ups-launch/${{from#*/root/ups-launch/}}". "${{@: -1}}"
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.long)])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> VastClient:
    if request.param == "real":
        if not REAL:
            pytest.skip("UPS_VASTAI does not name the client of Vast")
        return VastClient(REAL, call_seconds=60)
    text = f'#!/usr/bin/env bash\nexec {sys.executable} -S {vastai_program.__file__} "$@"\n'
    return VastClient(str(program(tmp_path / "vastai", text)), call_seconds=60)


@pytest.fixture
def patience() -> Patience:
    return Patience(poll=0.2, start=300, lost=3, late=3, teardown=400, copy=60)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VastServer]:
    monkeypatch.setattr(vast, "OUTPUT", "$HOME/output")
    monkeypatch.setattr(vast, "COLLECT_SECONDS", 300)
    monkeypatch.setenv("VAST_API_KEY", ACCOUNT_KEY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "vast"
    folder.mkdir()
    program(tmp_path / "on-machine" / "python3", PYTHON.format(python=sys.executable))
    program(tmp_path / "bin" / "rsync", RSYNC.format(folder=folder))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with serve(folder, ACCOUNT_KEY, secrets=dict(SECRETS), programs=str(tmp_path / "on-machine")) as started:
        monkeypatch.setenv("VAST_URL", started.url)
        yield started


def job(tmp_path: Path, **changes: Any) -> VastJob:
    settings = {"started": time.time(), "secrets": sorted(SECRETS), "max_hours": 1, "max_price": 0.5} | changes
    return VastJob(machine(**settings), tmp_path / "runs" / "waves", "RTX_4090:1", "pytorch/pytorch")


def gone(server: VastServer) -> bool:
    """No machine, and nothing that runs on one."""
    end = time.monotonic() + 60
    while processes_below(server.folder) and time.monotonic() < end:
        time.sleep(0.1)
    return not server.machines and not processes_below(server.folder)


def everything_below(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.rglob("*")) if path.is_file())


class CommandLines(threading.Thread):
    """What a list of processes shows, again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[str] = set()
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.1):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen.add(path.read_text(errors="replace"))
                except OSError:
                    continue


def test_a_run_ends_its_results_are_here_and_the_machine_is_gone(
    server: VastServer, client: VastClient, patience: Patience, tmp_path: Path
) -> None:
    lines: list[str] = []
    processes = CommandLines()
    processes.start()
    outcome = launch(job(tmp_path), client, lines.append, patience)
    processes.done.set()
    processes.join(10)
    assert outcome == RentalOutcome(7000, 0, uploaded=True, copied=tmp_path / "runs" / "waves")
    assert (tmp_path / "runs" / "waves" / "run.json").is_file()
    assert gone(server)
    assert "step 1 of 2" in lines
    # A secret is in the field that is its own, and nowhere else: not in a body, a path, a file, a line or a process.
    assert {who for _, path, who, _ in server.requests} <= {ACCOUNT_KEY, ""}, "some things are asked without a key"
    sent = "\n".join(f"{path} {body}" for _, path, _, body in server.requests)
    for text in (sent, *lines, *processes.seen, everything_below(tmp_path / "runs"), everything_below(server.folder)):
        assert "canary" not in text
    assert any("onstart" in body for *_, body in server.requests), "the script was among what was looked at"


def test_the_verdict_of_the_run_is_that_of_the_launcher(
    server: VastServer, client: VastClient, patience: Patience, tmp_path: Path
) -> None:
    server.variables = {"RUN_CODE": "7"}
    assert launch(job(tmp_path), client, patience=patience).code == 7
    assert gone(server)


@pytest.mark.parametrize("fault", ["fail", "hang", "late", "lose"])
def test_a_machine_whose_making_was_not_answered_is_found_and_destroyed(
    server: VastServer, client: VastClient, patience: Patience, tmp_path: Path, fault: str
) -> None:
    server.faults = {"create": [fault]}
    if client.program != REAL:
        client = VastClient(client.program, HANGING_SECONDS)
    with pytest.raises(VastSilent):
        launch(job(tmp_path), client, patience=patience)
    assert gone(server)
    made = bool(list(server.folder.glob("machine-*")))
    assert made == (fault in ("late", "lose"))
    assert len([1 for method, path, *_ in server.requests if "/asks/" in path]) == 1, "a second one is a second machine"


def test_an_offer_that_is_taken_is_left_for_the_next(
    server: VastServer, client: VastClient, patience: Patience, tmp_path: Path
) -> None:
    server.faults = {"create": ["refuse"]}
    assert launch(job(tmp_path), client, patience=patience).code == 0
    server.faults = {"create": ["refuse*"]}
    with pytest.raises(VastError, match="create is not possible"):
        launch(job(tmp_path), client, patience=patience)
    assert gone(server)


@pytest.mark.parametrize(
    "faults",
    [
        {"destroy": ["fail", "lose"]},
        {"list": ["fail", "refuse"]},
        {"show": ["fail", "fail"], "logs": ["fail"]},
        {"show": ["stale"]},
    ],
    ids=["destroy", "list", "show", "stale"],
)
def test_a_server_that_fails_for_a_while_is_asked_again(
    server: VastServer, client: VastClient, patience: Patience, tmp_path: Path, faults: dict[str, list[str]]
) -> None:
    server.faults = faults
    assert launch(job(tmp_path), client, patience=replace(patience, late=60)).code == 0
    assert gone(server)


@pytest.mark.parametrize("operation", ["destroy", "list"])
def test_a_machine_that_nobody_can_destroy_is_named(
    server: VastServer, client: VastClient, patience: Patience, tmp_path: Path, operation: str
) -> None:
    server.faults = {operation: ["fail*"]}
    short = Patience(poll=0.2, late=1, teardown=30 if client.program == REAL else 3, copy=60)
    with pytest.raises(InstanceLeftError, match="machine 7000 may still be there") as raised:
        launch(job(tmp_path), client, patience=short)
    assert raised.value.exit_code == 12
    assert raised.value.cause == "instance_left"
    assert "destroy instance 7000" in raised.value.hint


def test_a_machine_that_goes_away_by_itself_is_lost(
    server: VastServer, client: VastClient, patience: Patience, tmp_path: Path
) -> None:
    server.variables = {"RUN_HANGS": "1"}

    def taken_away(line: str) -> None:
        if "step 1" in line:
            server.destroy(7000)

    with pytest.raises(HostLostError, match="7000 is gone"):
        launch(job(tmp_path), client, taken_away, patience)
    assert gone(server)


def test_a_machine_that_costs_more_than_was_said_is_destroyed_though_the_list_does_not_have_it_yet(
    server: VastServer, client: VastClient, patience: Patience, tmp_path: Path
) -> None:
    server.variables = {"RUN_HANGS": "1"}
    server.faults = {"list": ["stale*"]}

    def costs_more(line: str) -> None:
        if "step 1" in line:
            server.machines[7000]["dph_total"] = 0.6

    with pytest.raises(MachineError, match=r"costs 0\.6 dollars"):
        launch(job(tmp_path), client, costs_more, patience)
    assert gone(server)


def test_a_machine_that_never_starts_is_destroyed(server: VastServer, client: VastClient, tmp_path: Path) -> None:
    server.starts, server.status = False, "loading"
    with pytest.raises(MachineError, match="has not started"):
        launch(job(tmp_path), client, patience=Patience(poll=0.2, start=1, late=1, teardown=100))
    assert gone(server)


def test_nothing_is_made_that_costs_more_or_lacks_a_secret(
    server: VastServer, client: VastClient, patience: Patience, tmp_path: Path
) -> None:
    server.price = 0.6
    with pytest.raises(MachineError, match=r"below 0\.5 dollars"):
        launch(job(tmp_path), client, patience=patience)
    server.price = 0.4
    with pytest.raises(MachineError, match="no variable HF_TOKEN"):
        launch(job(tmp_path, secrets=["HF_TOKEN"]), client, patience=patience)
    assert not list(server.folder.glob("machine-*"))


# The command itself, with less patience; the machine writes where the server looks for its lines.
COMMAND = """
import functools, sys
from ups.launch import vast
vast.Patience = functools.partial(vast.Patience, poll=0.2, late=3, teardown={teardown})
vast.OUTPUT, vast.COLLECT_SECONDS = "$HOME/output", 2
from ups.cli.main import main
sys.argv = ["ups", *sys.argv[1:]]
sys.exit(main())
"""


def command(client: VastClient, tmp_path: Path, teardown: float = 100) -> Any:
    """`ups launch vast` as a process."""
    recipe = tmp_path / "waves.yaml"
    recipe.write_text(machine().recipe)
    words = ["launch", "vast", str(recipe), "--max-price", "0.5", "--max-hours", "1", "--gpus", "RTX_4090:1"]
    words += ["--image", "pytorch/pytorch", "--install", "universal-simulator", "--mirror", "s3://bucket/waves"]
    words += ["--secret", "AWS_SECRET_ACCESS_KEY", "--vastai", client.program]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(teardown=teardown), *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_run(server: VastServer) -> None:
    end = time.monotonic() + 300
    while "step 1 of 2" not in server.log(7000):
        assert time.monotonic() < end, everything_below(server.folder)
        time.sleep(0.1)


def test_a_launcher_that_is_asked_to_leave_destroys_the_machine(
    server: VastServer, client: VastClient, tmp_path: Path
) -> None:
    server.variables = {"RUN_HANGS": "1"}
    process = command(client, tmp_path)
    wait_for_run(server)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 143, output
    assert gone(server)


@pytest.mark.parametrize("run", ["ends", "is killed"])
def test_a_machine_whose_launcher_was_killed_destroys_itself(
    server: VastServer, client: VastClient, tmp_path: Path, run: str
) -> None:
    server.variables = {} if run == "ends" else {"RUN_HANGS": "1"}
    process = command(client, tmp_path)
    wait_for_run(server)
    process.kill()
    process.wait(10)
    if run == "is killed":
        os.kill(int((server.home(7000) / "ups-launch" / "main.pid").read_text()), signal.SIGKILL)
    end = time.monotonic() + 150
    while server.machines and time.monotonic() < end:
        time.sleep(0.2)
    assert gone(server)
    method, path, who, _ = server.requests[-1]
    assert (method, path, who) == ("DELETE", "/api/v0/instances/7000/", server.key_of(7000)), "by its own key"


def test_the_watchdog_does_not_take_a_run_that_is_being_started_for_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vast, "COLLECT_SECONDS", 0)
    for name in ("sleep", "python3"):
        program(tmp_path / "bin" / name, f"#!/usr/bin/env bash\necho {name} >> {tmp_path}/called; exec /bin/sleep 30\n")
    (tmp_path / "main.pid").touch()
    watch = vast.watch(machine(started=time.time()))
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    with subprocess.Popen(["bash", "-c", watch], cwd=tmp_path, env=environment, start_new_session=True) as process:
        try:
            end = time.monotonic() + 60
            while not (tmp_path / "called").exists():
                assert time.monotonic() < end
                time.sleep(0.1)
            assert (tmp_path / "called").read_text() == "sleep\n", "it looks again later, and destroys nothing"
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("run", ["hangs", pytest.param("deaf", marks=pytest.mark.long)])
def test_a_machine_whose_hours_are_over_is_gone_whatever_its_run_does(
    server: VastServer, tmp_path: Path, run: str
) -> None:
    server.variables = {"RUN_HANGS": run}
    started = time.time()
    rented = machine(started=started, max_hours=20 / 3600)
    number = server.make({"onstart": onstart(rented), "label": "ups"})
    end = time.monotonic() + 60
    while server.machines and time.monotonic() < end:
        time.sleep(0.1)
    assert gone(server)
    assert server.requests[-1][2] == server.key_of(number)
    assert time.time() - started > 14, "it had its time"
    if run == "hangs":
        assert "UPS-LAUNCH ended code=143 results=yes" in server.log(number), "it was asked first, and left its results"


def test_the_command_names_a_machine_that_is_left_and_its_exit_code_says_so(
    server: VastServer, client: VastClient, tmp_path: Path
) -> None:
    server.faults = {"destroy": ["refuse*"]}
    process = command(client, tmp_path, teardown=30 if client.program == REAL else 4)
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 12, output
    assert "error: instance_left: machine 7000 may still be there" in output
    assert "canary" not in output


@pytest.mark.parametrize(
    "wrong", [{"gpus": "RTX 4090"}, {"image": "x y"}, {"machine": machine(mirror="")}], ids=["gpus", "image", "mirror"]
)
def test_what_vast_would_misread_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    settings = {"machine": machine(), "run_dir": tmp_path, "gpus": "RTX_4090:1", "image": "pytorch/pytorch"}
    with pytest.raises(ConfigError):
        VastJob(**(settings | wrong))


@pytest.mark.parametrize(
    ("image", "cuda"),
    [
        ("pytorch/pytorch:2.13.0-cuda12.8-cudnn9-runtime", "12.8"),
        ("registry.example.org/pytorch:2.11.1-cuda13.2-cudnn9-devel", "13.2"),
        ("pytorch/pytorch:2.4.1-cuda12.1-cudnn9-runtime", "13.0"),  # too old for ups: pip brings another torch
        ("nvidia/cuda:12.4.1-runtime-ubuntu22.04", "13.0"),  # without torch
        ("registry.example.org/ups:1.0", "13.0"),
    ],
)
def test_offers_have_a_driver_for_the_cuda_of_torch(tmp_path: Path, image: str, cuda: str) -> None:
    assert search_words(replace(job(tmp_path), image=image))[2].endswith(f" cuda_vers>={cuda}")


def test_the_script_fits_and_a_recipe_that_is_too_long_is_refused(tmp_path: Path) -> None:
    assert len(onstart(machine())) <= MAX_CHARACTERS
    with pytest.raises(ConfigError, match="too long"):
        onstart(machine(recipe="\n".join(f"# {os.urandom(40).hex()}" for _ in range(40))))
    assert "dph_total<=0.5" in search_words(job(tmp_path))[2]
    assert all(NAMES.fullmatch(name) for name in ("vast.sh", "vast_7000.log", "skypilot.yaml"))
    assert ended("noise\nUPS-LAUNCH ended code=9 results=no\n") == (9, False)
    assert ended('trap echo "UPS-LAUNCH ended code=$code"') is None
