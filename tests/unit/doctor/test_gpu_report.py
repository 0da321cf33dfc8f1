"""The report of a machine with GPUs: what it misses, what it hides, and a dry run on a machine without any."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.doctor_data import write_data, write_recipe
from ups.cli.doctor import examination_of
from ups.doctor import gpu_report
from ups.doctor.examine import Verdict
from ups.doctor.gpu_report import VARIANTS, cleaned, missing, write_report
from ups.errors import DataError
from ups.run.software import cleaner

PASSED = {"rung": "parity", "ok": True, "says": "well"}
WHOLE: dict[str, Any] = {
    "gpus": 2,
    "variants": {name: [PASSED] for name in VARIANTS},
    "tests": {"outcomes": {"tests/gpu/test_a.py::test_b[ddp]": "PASSED"}, "output": "1 passed"},
}


def test_a_whole_report_misses_nothing() -> None:
    assert missing(WHOLE) == []


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("gpus", 1, "1 GPUs: NCCL and strategies need at least 2"),
        ("variants", {**WHOLE["variants"], "fsdp": [PASSED, {**PASSED, "ok": False}]}, "fsdp: parity failed: well"),
        ("variants", {**WHOLE["variants"], "fsdp": []}, "fsdp: not examined, the time was up"),
        ("tests", {"outcomes": {"tests/gpu/t.py::a": "FAILED"}}, "tests/gpu/t.py::a: FAILED"),
        ("tests", {"outcomes": {"tests/gpu/t.py::a": "SKIPPED"}}, "1 of 1 tests of GPUs were skipped"),
    ],
)
def test_what_a_report_does_not_show_is_listed(key: str, value: Any, line: str) -> None:
    assert missing({**copy.deepcopy(WHOLE), key: value}) == [line]


def test_what_was_not_examined_is_listed() -> None:
    lines = missing({**WHOLE, "variants": {"ddp": [PASSED]}, "tests": {}})
    assert len(lines) == len(VARIANTS)
    assert all("not examined" in line for line in lines[:-1])
    assert lines[-1].startswith("tests/gpu: not run")


def test_a_report_names_no_secret_and_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    clean = cleaner({"API_TOKEN": "abcdef123456"})
    document = {"says": "/home/someone/x https://me:word@host/?key=1 abcdef123456", "log": "/tmp/x", "n": [1, None]}
    text = json.dumps(cleaned(document, clean))
    for secret in ("someone", "word@", "key=1", "abcdef123456", "/tmp/x"):
        assert secret not in text


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"gpus": "x"}', '{"gpus": 2, "variants": 3, "tests": 4}'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(DataError, match="is not a report of GPUs"):
        gpu_report.main(str(tmp_path / "report.json"))


def test_outcomes_of_tests_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\n@pytest.mark.skip\ndef test_none(): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    tests = gpu_report.run_tests(120.0)
    names = {name.split("::")[1]: outcome for name, outcome in tests["outcomes"].items()}
    assert names == {"test_good": "PASSED", "test_bad": "FAILED", "test_none": "SKIPPED"}
    tests = gpu_report.run_tests(0.0)
    assert "tests/gpu: not all run, the time was up" in missing(
        {**WHOLE, "tests": tests | {"outcomes": {"a": "PASSED"}}}
    )


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_a_dry_run_with_gloo_is_read_by_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path)
    recipe = write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)  # without tests/gpu
    monkeypatch.setattr(gpu_report, "VARIANTS", {name: VARIANTS[name] for name in ("ddp", "fsdp, bfloat16")})
    file, shown = tmp_path / "report.json", list[Verdict]()
    lines = write_report(file, partial(examination_of, str(recipe), 2, []), 18.0, shown.append)
    assert lines == ["0 GPUs: NCCL and strategies need at least 2", lines[-1]], (lines, shown)
    text = file.read_text()
    assert str(tmp_path) not in text
    assert [v["rung"] for v in json.loads(text)["variants"]["fsdp, bfloat16"]][-1] == "evaluation"
    read = subprocess.run(
        [sys.executable, "-m", "ups.doctor.gpu_report", str(file)], capture_output=True, text=True, timeout=60
    )
    assert read.returncode == 0, read.stderr
    assert lines[0] in read.stdout
    assert "ddp, gloo: not examined, the time was up" in read.stdout
