"""Asking for help costs nothing: CPU time of the commands people type most, and what they may import."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from ups.cli.main import COMMANDS

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "numpy", "h5py", "zarr", "scipy", "jax", "matplotlib")

pytestmark = pytest.mark.processes


def cpu_seconds(*arguments: str) -> float:
    """CPU time (user + system) of Python with these arguments, in a process of its own."""
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


def cost(*arguments: str, rounds: int = 7) -> float:
    """CPU time of the command as a multiple of importing its libraries: a slow machine is slow for both."""
    ratios = []
    for _ in range(rounds):
        libraries = cpu_seconds("-c", "import typer, yaml, pydantic")
        ratios.append(cpu_seconds("-m", "ups.cli.main", *arguments) / libraries)
    return statistics.median(ratios)


def imported_by(code: str) -> list[str]:
    script = f"import json, sys\n{code}\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    return modules


# Measured: 0.9 and 3.5, which are 0.15 and 0.5 s at rest. Importing torch would add 19.
def test_help_costs_little_more_than_its_libraries() -> None:
    assert cost("--help") < 1.8


def test_checking_a_recipe_costs_a_few_times_its_libraries() -> None:
    assert cost("config", "check", "recipes/tiny.yaml") < 5.5


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    modules = imported_by("import ups.cli.main")
    assert not set(HEAVY) & set(modules)
    assert not {"pydantic", "yaml", "rich"} & set(modules)


def test_help_imports_no_command() -> None:
    modules = imported_by("from ups.cli.main import run\nrun(['--help'])")
    assert not {row.module.partition(":")[0] for row in COMMANDS} & set(modules)
    assert "rich" not in modules


def test_no_command_module_imports_anything_heavy_before_it_is_called() -> None:
    modules = imported_by("from ups.cli.main import available\nfor row in available().values(): assert row.app()")
    assert not set(HEAVY) & set(modules)


def test_checking_a_recipe_imports_nothing_heavy() -> None:
    modules = imported_by(
        f"from ups.cli.main import run\nrun(['config', 'check', {str(ROOT / 'recipes/tiny.yaml')!r}])"
    )
    assert "ups.config.schema" in modules
    assert not set(HEAVY) & set(modules)


def test_loading_a_bundle_does_not_import_the_compiler_of_torch() -> None:
    """It takes as long as torch itself."""
    modules = imported_by("import ups; ups.Simulator.load('ups-joint')")
    assert not {"torch._dynamo", "sympy"} & set(modules)


def test_ddp_does_not_import_the_compiler_of_torch(tmp_path: Path) -> None:
    """Each rank would: torch's own DDP asks it two questions."""
    modules = imported_by(f"""
import sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from ups.distributed.strategies import Ddp
dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)
spread = Ddp(torch.nn.Linear(2, 2), SimpleNamespace(world_size=1))
with spread.micro_batch(is_last=True):
    spread.module(torch.ones(1, 2)).sum().backward()
assert spread.stage.weight.grad is not None
assert 'torch._dynamo' not in sys.modules
assert callable(torch._dynamo.disable)
dist.destroy_process_group()
""")
    assert "torch._dynamo" in modules  # for whoever asks for it
