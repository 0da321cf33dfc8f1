"""`import ups` offers its names without loading anything; editors and type checkers see them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ups


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_ups_loads_nothing() -> None:
    code = "import sys, ups; dir(ups); print([n for n in ('torch', 'numpy', 'pydantic', 'yaml') if n in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_train_and_run_need_no_torch_in_this_process() -> None:
    code = "import sys, ups; ups.train, ups.Run, ups.load_recipe; print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_every_public_name_is_found_and_documented() -> None:
    for name in ups.__all__:
        value = getattr(ups, name)
        assert name in dir(ups)
        assert value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = ups.trian


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(ups.__file__).parent / "py.typed").is_file()
