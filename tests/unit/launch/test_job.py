"""What a rented machine is told to do: limits, data that would be missing, words that must not stand in a script."""

from __future__ import annotations

import os
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ups.config.recipe import dump_recipe, resolve_data
from ups.errors import ConfigError
from ups.launch.job import OLDEST_PYTHON, RentedJob, fetch, leave_results, require_data, run, secret_names, setup

RECIPE: dict[str, Any] = {
    "version": 1,
    "run": {"name": "waves"},
    "data": {"tasks": [{"name": "advection1d", "path": "data/advection1d.zarr", "source": {"type": "generate"}}]},
    "model": {"type": "latent_operator"},
    "stages": [{"type": "operator", "steps": 2}],
    "tracking": {"trackers": [{"type": "wandb", "project": "p", "api_key": "${env:WANDB_API_KEY}"}]},
}


def machine(**changes: Any) -> RentedJob:
    settings: dict[str, Any] = {
        "name": "waves",
        "recipe": dump_recipe(resolve_data(RECIPE).recipe),
        "install": "universal-simulator @ https://example.org/universal_simulator-1.0-py3-none-any.whl",
        "max_price": 2.5,
        "max_hours": 8,
        "started": 1_000_000.0,
        "mirror": "s3://bucket/waves",
    }
    return RentedJob(**(settings | changes))


def test_the_hours_count_from_the_launch_and_leave_time_to_save() -> None:
    eight = machine()
    assert eight.deadline == 1_000_000 + 8 * 3600
    assert eight.deadline - eight.stop_at == 600
    short = machine(max_hours=0.1)
    assert short.deadline - short.stop_at == 90
    assert f"left=$(left_until {eight.stop_at})" in run(eight, "true")
    assert (eight.install_seconds, short.install_seconds) == (3600, 180)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_price": 0},
        {"max_price": float("nan")},
        {"max_hours": -1},
        {"max_hours": float("inf")},
        {"install": ""},
        {"install": "--index-url=https://example.org"},
        {"install": "git+https://someone:token@example.org/ups"},
        {"install": "git+https://someone:to/ken@example.org/ups"},
        {"install": "universal-simulator @ https://example.org/a-1.0-py3-none-any.whl?signature=canary"},
        {"install": "git+https://example.org/ghp_0123456789abcdefABCDEF/ups"},
        {"install": "universal-simulator @ https://example.org/ups.whl"},
        {"install": "universal_simulator-1.0-py3-none-any.whl"},
        {"install": "."},
        {"mirror": "bucket/waves"},
        {"mirror": "s3://bucket/$(id)"},
        {"mirror": "s3://bucket/AKIA0123456789ABCDEF"},
        {"data": ["data/a.zarr"]},
        {"data": ["/etc/passwd=s3://bucket/a"]},
        {"data": ["../a=s3://bucket/a"]},
        {"data": ["data/a.zarr=https://example.org/a"]},
        {"secrets": ["WANDB_API_KEY=canary"]},
        {"variables": ["WANDB_API_KEY=canary"]},
        {"variables": ["NCCL_P2P_DISABLE"]},
        {"variables": ["HTTPS_PROXY=http://someone:canary@proxy.example.org:3128"]},
    ],
)
def test_what_has_no_limit_or_would_write_a_secret_down_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        machine(**wrong)
    assert "variables" not in wrong or "canary" not in f"{raised.value.message} {raised.value.hint}"


@pytest.mark.parametrize(
    "install", ["git+https://example.org/ups@v1.0#subdirectory=a", "git+https://example.org:8443/ups", "ups[buckets]"]
)
def test_what_pip_takes_without_a_secret_is_installed(install: str) -> None:
    assert install in "\n".join(setup(machine(install=install)))


def test_data_that_would_not_be_there_is_named_before_anything_is_paid() -> None:
    require_data(resolve_data(RECIPE).recipe, [])
    tasks = [{"name": "advection1d", "path": "data/advection1d.zarr"}]
    recipe = resolve_data(RECIPE | {"data": {"tasks": tasks}}).recipe
    with pytest.raises(ConfigError, match="advection1d"):
        require_data(recipe, ["data/other.zarr=s3://bucket/other.zarr/"])
    require_data(recipe, ["data=s3://bucket/data/"])
    require_data(recipe, ["data/advection1d.zarr=s3://bucket/a/"])


def test_secrets_are_those_of_the_recipe_and_those_that_were_named() -> None:
    assert secret_names(machine().recipe, ["AWS_SECRET_ACCESS_KEY"]) == ["AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"]


# In place of Python: says what it was called with; the run makes its directory and leaves with CODE.
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$HOME/calls"
case "$*" in
  "-c import sys;"*) exit "${OLD:-0}" ;;
  "-m ups run"*)
    mkdir -p runs/waves
    if [ -n "${HANG:-}" ]; then trap 'exit 143' TERM; sleep 20 & wait; fi
    exit "${CODE:-0}" ;;
esac
"""


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Run lines of bash in a home of their own; returns the exit code and what Python was called with."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)

    def start(lines: list[str], **variables: str) -> tuple[int, list[str]]:
        environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), **variables}
        done = subprocess.run(["bash", "-c", "\n".join(lines)], env=environment, timeout=60, check=False)
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    return start


def test_a_machine_installs_fetches_runs_and_leaves_its_results(shell: Any, tmp_path: Path) -> None:
    rented = machine(started=time.time(), data=["data/a.zarr=s3://bucket/a.zarr/", "data/b.h5=s3://bucket/b.h5"])
    lines = [*setup(rented), *fetch(rented), *run(rented, "python3 -m ups run recipe.yaml"), *leave_results(rented)]
    code, calls = shell([*lines, 'echo "$kept" > "$HOME/kept"; exit "$code"'], CODE="9")
    assert code == 9, "the verdict of the run, although the results were kept afterwards"
    assert calls == [
        "-c import sys; sys.exit(sys.version_info < (3, 11))",
        "-m venv --system-site-packages env",
        "-m pip install --quiet universal-simulator @ https://example.org/universal_simulator-1.0-py3-none-any.whl",
        "-m pip install --quiet --target aws-cli awscli",
        "-m awscli s3 sync s3://bucket/a.zarr/ data/a.zarr --only-show-errors",
        "-m awscli s3 cp s3://bucket/b.h5 data/b.h5 --only-show-errors",
        "-m ups run recipe.yaml",
        "-m awscli s3 sync runs/waves s3://bucket/waves-results --exclude checkpoints/* --only-show-errors",
    ]
    assert (tmp_path / "kept").read_text() == "yes\n"
    assert (tmp_path / "ups-launch" / "recipe.yaml").read_text() == rented.recipe


# In place of uv: writes down its words, and makes an environment that says that it was entered.
UV = """#!/usr/bin/env bash
printf 'uv %s\\n' "$*" >> "$HOME/calls"
mkdir -p env/bin && echo 'echo entered >> "$HOME/calls"' > env/bin/activate
"""


@pytest.mark.parametrize("has_uv", [True, False])
def test_an_image_with_an_older_python_gets_one_of_its_own(shell: Any, tmp_path: Path, has_uv: bool) -> None:
    """Without uv in the image pip brings it; here pip does nothing, so that what it would bring lies there already."""
    program = tmp_path / ("bin" if has_uv else "ups-launch/uvp/bin") / "uv"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(UV)
    program.chmod(0o755)
    code, calls = shell(setup(machine(mirror="")), OLD="1", PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert code == 0
    brought = [] if has_uv else ["-m pip install --quiet --target uvp uv"]
    assert calls[1:-1] == [*brought, "uv venv --quiet --seed --python 3.11 env", "entered"]
    assert calls[-1].startswith("-m pip install --quiet universal-simulator @ ")


def test_an_image_for_which_no_python_can_be_had_is_not_used(shell: Any, tmp_path: Path) -> None:
    code, calls = shell(setup(machine()), OLD="1", PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert code == 5
    assert not any("universal-simulator" in call for call in calls)


def test_the_oldest_python_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={'.'.join(map(str, OLDEST_PYTHON))}"


def test_a_run_is_asked_to_leave_when_its_time_is_up(shell: Any) -> None:
    started = time.time()
    rented = machine(started=started, max_hours=8 / 3600)  # six seconds, and two to save
    code, _ = shell([*setup(rented), *run(rented, "python3 -m ups run recipe.yaml"), 'exit "$code"'], HANG="1")
    assert code == 143
    assert 3 < time.time() - started < 30


def test_a_run_whose_hours_are_over_is_not_started(shell: Any) -> None:
    rented = machine(started=time.time() - 8 * 3600)
    code, calls = shell([*setup(rented), *run(rented, "python3 -m ups run recipe.yaml"), 'exit "$code"'])
    assert code == 143
    assert "-m ups run recipe.yaml" not in calls
