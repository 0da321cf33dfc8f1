"""The pictures of a benchmark come from its result and the bundle of the joint model, without a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.protocol.measure import machine
from benchmarks.protocol.pictures import median_seed
from benchmarks.protocol.recipes import KEPT, row
from benchmarks.protocol.trainings import LOCK_NAME, Bench
from tests.support.mixture import write_mixture
from ups.config.model import MultiscaleConfig
from ups.data.normalize import ensure_statistics
from ups.data.open import open_paths
from ups.errors import DataError, RunHeldError
from ups.inference.bundle import BundleInfo, write_bundle
from ups.models.build import build_model
from ups.run.progress_line import ProgressLine
from ups.supervise.run_file import hold_lock

pytest.importorskip("matplotlib")
# Names of the benchmark for the small tasks of the tests; only names count here.
AS = {"ks1d": "wave1d", "ns2d": "flow2d", "darcy2d": "darcy2d"}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A finished benchmark directory: a result and the bundle of an untrained joint model."""
    write_mixture(tmp_path / "data")
    readers = []
    for name, own in AS.items():
        path = tmp_path / "data" / f"{own}.zarr"
        readers.append(open_paths(path.rename(path.with_name(f"{name}.zarr"))))
        readers[-1].rename(name)
    tasks = [reader.task for reader in readers]
    statistics = {r.task.name: ensure_statistics(r, str(tmp_path / "data" / f"{r.task.name}.zarr")) for r in readers}
    config = MultiscaleConfig(widths=[8, 8], blocks=[1, 1], kernel_size=3, num_heads=2)
    stepper = build_model(config, tasks, statistics, 1)
    coordinates = {reader.task.name: reader.coordinates for reader in readers}
    info = BundleInfo(stepper.configs, 1, tuple(tasks), statistics, coordinates)
    out = tmp_path / "bench"
    rows = [
        row("ups", task, dict.fromkeys(KEPT, value), seed=seed, parameters=1, steps=1, cpu_seconds=1.0, rollout_ms=1.0)
        for task in AS
        for seed, value in enumerate((0.3, float("inf"), 0.1))
    ]
    assert median_seed(rows) == ("ups", 0, tuple(AS))
    (out / "runs" / "ups-all").mkdir(parents=True)
    write_bundle(out / "runs/ups-all/bundle", stepper, info, config_text="run:\n  name: ups-all\n", card="# ups\n")
    document = {
        "protocol": "ups-bench v1",
        "command": "python -m benchmarks.protocol",
        "cpu_seconds_per_task": 240.0,
        "machine": {"cpu": "one"},
        "data": dict.fromkeys(AS, "0" * 64),
        "failures": [],
        "rows": rows,
    }
    from ups.evaluation.results import to_json

    (out / "bench.json").write_text(json.dumps(to_json(document)))
    return Bench([], [], tmp_path / "data", out, cpu_seconds=1.0, small=True)


def test_page_and_pictures_are_written_again_from_what_is_on_disk(bench: Bench) -> None:
    bench.write_page()
    names = sorted(path.name for path in (bench.out / "pictures").iterdir())
    assert names == ["cost-by-task.png", "cost.png", "joint-model.png"]  # no ratios: there is no other model
    page = bench.page.read_text()
    assert all(f"](pictures/{name})" in page for name in names)
    assert "| ks1d | **0.3** (0.1 to blew up) |" in page


def test_a_lost_bundle_costs_one_picture_and_not_the_page(bench: Bench) -> None:
    (bench.out / "runs/ups-all/bundle/bundle.json").unlink()
    bench.write_page()
    assert "cost.png" in bench.page.read_text()
    assert "joint-model.png" not in bench.page.read_text()


def test_without_a_result_there_is_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"bench\.json does not exist"):
        Bench([], [], tmp_path, tmp_path, cpu_seconds=1.0, small=True).write_page()


@pytest.mark.parametrize("text", ["{", "[]", "{}", "null"])
def test_a_damaged_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(DataError, match=r"bench\.json is"):
        Bench([], [], tmp_path, tmp_path, cpu_seconds=1.0, small=True).write_page()


def test_one_bench_at_a_time_works_in_a_directory(tmp_path: Path) -> None:
    with hold_lock(tmp_path / LOCK_NAME, ""), pytest.raises(RunHeldError, match="another benchmark is at work"):
        Bench([], [], tmp_path, tmp_path, cpu_seconds=1.0, small=True).run(1, ProgressLine())


def test_costs_of_another_machine_are_used_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench([], [], tmp_path, tmp_path, cpu_seconds=1.0, small=True)
    costs = {"machine": {"cpu": "another"}, "costs": {"a": 1}, "yardstick_seconds": 0.1}
    bench.costs.write_text(json.dumps(costs))
    assert bench._read_costs(ProgressLine()) == costs
    assert "is of another machine or version" in "".join(capsys.readouterr())
    for damaged in ("null", "{}", json.dumps(costs | {"machine": machine(), "yardstick_seconds": None})):
        bench.costs.write_text(damaged)
        assert bench._read_costs(ProgressLine())["costs"] == {}
