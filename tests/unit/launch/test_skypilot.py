"""Tasks for SkyPilot: what they ask for, how hosts find each other, names of secrets, and SkyPilot's own reader."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.launch.test_job import machine
from ups.errors import ConfigError, MachineError
from ups.launch.skypilot import SkyPilotJob, command, submit, task, text

SKYPILOT = os.environ.get("UPS_SKYPILOT_PYTHON", "")


def job(tmp_path: Path, **changes: Any) -> SkyPilotJob:
    settings = {"machine": machine(), "run_dir": tmp_path / "runs" / "waves"}
    return SkyPilotJob(**(settings | changes))


def test_it_asks_for_what_was_said_and_never_for_more(tmp_path: Path) -> None:
    document = task(job(tmp_path, gpus="A100:8", cpus=40, spot=True, infra="aws/us-east-1"))
    resources = document["resources"]
    assert resources["accelerators"] == "A100:8"
    assert resources["cpus"] == "40+"
    assert resources["use_spot"] is True
    assert resources["infra"] == "aws/us-east-1"
    assert resources["max_hourly_cost"] == 2.5
    assert resources["autostop"] == {"idle_minutes": 10, "down": True}
    assert "--set checkpoint.mirror=s3://bucket/waves" in document["run"]
    assert "timeout --foreground" in document["run"]
    assert yaml.safe_load(text(job(tmp_path))) == task(job(tmp_path))


def test_the_price_is_that_of_all_hosts(tmp_path: Path) -> None:
    three = task(job(tmp_path, nodes=3, volume="shared", machine=machine(max_price=1)))
    assert three["resources"]["max_hourly_cost"] == 0.3333


def test_several_hosts_get_their_number_and_the_address_of_the_first(tmp_path: Path) -> None:
    document = task(job(tmp_path, nodes=2, gpus="A100:8", volume="shared", machine=machine(ranks=16)))
    assert document["num_nodes"] == 2
    assert document["volumes"] == {"/ups-volume": "shared"}
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "python3"
    program.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$HOME/words"\n')
    program.chmod(0o755)
    (tmp_path / "ups-launch").mkdir()
    (tmp_path / "volume").mkdir()
    script = document["run"].replace("/ups-volume", str(tmp_path / "volume"))
    script = script.replace(str(machine().stop_at), str(int(time.time()) + 3600))
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
        "SKYPILOT_NODE_RANK": "1",
    }
    subprocess.run(["bash", "-c", script], env=environment, timeout=60, check=True)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:5] == ["-P", "-m", "ups", "train", str(tmp_path / "ups-launch" / "recipe.yaml")]
    assert words[-6:] == ["--hosts", "2", "--host", "1", "--address", "10.0.0.7:29500"]
    assert words[5:7] == ["--ranks", "16"]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"spot": True, "machine": machine(mirror="")}, "mirror"),
        ({"nodes": 2}, "volume"),
        ({"gpus": "A100"}, "KIND:COUNT"),
        ({"infra": "aws; id"}, "infra"),
        ({"volume": "Shared Volume"}, "volume"),
    ],
)
def test_what_would_lose_the_run_or_be_misread_is_refused(tmp_path: Path, wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as raised:
        job(tmp_path, **wrong)
    assert word in f"{raised.value.message} {raised.value.hint}"


# In place of `sky`: writes down how it was called, and what `ps` would show meanwhile.
SKY = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$SEEN/words"
tr '\\0' ' ' < /proc/$$/cmdline > "$SEEN/process"
cp "${@: -1}" "$SEEN/task.yaml"
echo "Managed Job ID: 7"
exit "${SKY_CODE:-0}"
"""


def test_secrets_are_handed_on_by_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sky"
    program.write_text(SKY)
    program.chmod(0o755)
    monkeypatch.setenv("SEEN", str(tmp_path))
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.setenv(name, f"canary-{name}")
    cloud_job = job(tmp_path, machine=machine(secrets=["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"]))
    assert submit(cloud_job, str(program)) == "Managed Job ID: 7"
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:4] == ["jobs", "launch", "--yes", "--detach-run"]
    assert words[4:6] == ["--secret", "AWS_ACCESS_KEY_ID"]
    assert yaml.safe_load((tmp_path / "task.yaml").read_text())["secrets"] == {
        "AWS_ACCESS_KEY_ID": None,
        "AWS_SECRET_ACCESS_KEY": None,
        "WANDB_API_KEY": None,
    }
    for path in (tmp_path / "words", tmp_path / "process", tmp_path / "task.yaml"):
        assert "canary" not in path.read_text()


def test_what_sky_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match="there is no"):
        submit(job(tmp_path), str(tmp_path / "sky"))
    program = tmp_path / "sky"
    program.write_text("#!/bin/sh\necho 'Catalog does not contain any instances below the price' >&2; exit 1\n")
    program.chmod(0o755)
    with pytest.raises(MachineError, match="below the price"):
        submit(job(tmp_path), str(program))
    assert [path.name for path in (tmp_path / "runs" / "waves" / "launch").iterdir()] == ["skypilot.yaml"]


READER = """
import sys, sky, yaml
task = sky.Task.from_yaml_config(yaml.safe_load(open(sys.argv[1])), secrets_overrides=[("WANDB_API_KEY", "x")])
(resources,) = task.resources
print(task.name, task.num_nodes, resources.accelerators, resources.use_spot, resources.max_hourly_cost)
print(resources.autostop_config.down, resources.autostop_config.idle_minutes)
"""


PARSER = """
import os
os.environ["WANDB_API_KEY"] = "x"
from sky.client.cli.command import jobs_launch
params = jobs_launch.make_context("launch", {words}).params
print(params["secret"], params["entrypoint"], params["yes"], params["detach_run"])
"""


@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.long
@pytest.mark.skipif(not SKYPILOT, reason="UPS_SKYPILOT_PYTHON does not name a Python with SkyPilot")
def test_skypilot_itself_accepts_the_task(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"

    def read(text: str, program: str = READER) -> subprocess.CompletedProcess[str]:
        path.write_text(text)
        environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        words = [SKYPILOT, "-c", program, str(path)]
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)

    one = job(tmp_path, gpus="A100:8", spot=True, machine=machine(secrets=["WANDB_API_KEY"], variables=["A=1"]))
    done = read(text(one))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["waves 1 {'A100': 8} True 2.5", "True 10"]
    done = read(text(job(tmp_path, gpus="A100:8")), "import sys, sky; print(sky.Task.from_yaml(sys.argv[1]).run)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == task(job(tmp_path, gpus="A100:8"))["run"].rstrip("\n")
    words = command("sky", one, path)
    assert words[1:3] == ["jobs", "launch"]
    done = read(text(one), PARSER.format(words=words[3:]))
    assert done.stdout.splitlines() == [f"(('WANDB_API_KEY', 'x'),) ('{path}',) True True"], done.stderr
    wrong = yaml.safe_load(text(one))
    wrong["resources"]["max_hourly_price"] = wrong["resources"].pop("max_hourly_cost")
    done = read(yaml.safe_dump(wrong))
    assert done.returncode != 0
    assert "max_hourly_price" in done.stderr
