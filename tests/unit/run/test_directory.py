"""A run directory belongs to one recipe; what identifies a run is written before ranks start, and no secret with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.mixture import mixture_recipe, write_mixture
from ups.config.recipe import recipe_file, resolve
from ups.config.schema import Recipe
from ups.data.open import open_tasks
from ups.errors import ConfigError, DataError
from ups.run.directory import check_ranks, ensure_run_statistics, prepare, read_statistics, run_dir_of
from ups.run.software import kept_variables


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tasks = write_mixture(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(mixture_recipe(tmp_path / "run", tasks)))
    return path


def prepared(recipe: Path, *overrides: str) -> Path:
    resolved = resolve(recipe, overrides)
    run_dir = run_dir_of(resolved, str(recipe))
    prepare(run_dir, resolved, 1)
    return run_dir


def test_the_run_holds_the_resolved_recipe_and_its_hash(recipe: Path) -> None:
    run_dir = prepared(recipe)
    resolved = resolve(recipe)
    assert (run_dir / "config.yaml").read_text() == resolved.text
    description = json.loads((run_dir / "env.json").read_text())
    assert description["config_sha256"] == resolved.hash
    assert description["software"]["libraries"]["torch"]
    assert run_dir_of(resolve(recipe_file(run_dir)), str(run_dir)) == run_dir


def test_a_recipe_that_learns_something_else_is_refused_and_named(recipe: Path) -> None:
    (prepared(recipe) / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"stages\.0\.optim\.learning_rate was 0\.002 and is 0\.001"):
        prepared(recipe, "stages.0.optim.learning_rate=1e-3")
    with pytest.raises(ConfigError, match=r"run\.seed was 3 and is 4"):
        prepared(recipe, "run.seed=4")


@pytest.mark.parametrize(
    "change", ["engine.strategy=ddp", "checkpoint.keep=9", "data.loader.workers=1", "engine.micro_batch_size=2"]
)
def test_how_a_run_is_run_may_change(recipe: Path, change: str) -> None:
    run_dir = prepared(recipe)
    assert prepared(recipe, change) == run_dir
    assert (run_dir / "config.yaml").read_text() == resolve(recipe, [change]).text


def test_secrets_reach_no_file_of_the_run(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "canary-7f3a9c51d2"
    monkeypatch.setenv("WANDB_API_KEY", canary)
    monkeypatch.setenv("UPS_TRACKER_TOKEN", canary)
    monkeypatch.setenv("UPS_NOTE", f"https://user:{canary}@host")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    run_dir = prepared(recipe)
    for path in run_dir.rglob("*"):
        assert canary not in path.read_text(), path
    variables = json.loads((run_dir / "env.json").read_text())["variables"]
    assert variables["NCCL_DEBUG"] == "INFO"
    assert "UPS_TRACKER_TOKEN" not in variables
    assert "UPS_NOTE" not in variables


def test_no_variable_is_kept_for_the_beginning_of_its_name(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "canary-7f3a9c51d2"
    names = (
        "SLURM_JWT",
        "UPS_PASS",
        "UPS_DSN",
        "NCCL_X",
        "TORCH_HOME_URL",
        "PYTHONPATH",
        "CUDA_NOTE",
        "OMP_",
        "GLOO_S",
    )
    for name in names:
        monkeypatch.setenv(name, f"postgres://user:{canary}@host/db")
    # Names that are kept, with a secret in the value: a URL with user information, or the value of a secret.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"s3://user:p@{canary}@host/cache https://{canary}@other")
    monkeypatch.setenv("SLURM_JOB_NAME", f"job-{canary}-1")
    monkeypatch.setenv("SERVICE_API_KEY", canary)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    run_dir = prepared(recipe)
    for path in run_dir.rglob("*"):
        assert path.is_dir() or canary not in path.read_text(), path
    variables = json.loads((run_dir / "env.json").read_text())["variables"]
    assert variables["SLURM_JOB_ID"] == "4711"
    assert variables["SLURM_JOB_NAME"] == "(redacted)"
    assert not set(names) & set(variables)


def test_user_information_is_cut_out_of_every_url() -> None:
    value = "tcp://user:pa/ss@host:1 https://token@a.b/c?x=@y plain@name"
    variables = kept_variables({"NCCL_DEBUG": value, "GLOO_SOCKET_IFNAME": "lo"})
    assert variables == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "tcp://host:1 https://y plain@name"}


def measure(run_dir: Path, config: Recipe) -> None:
    with open_tasks(config.data) as readers:
        ensure_run_statistics(run_dir, config, readers)


def test_statistics_are_made_once_and_belong_to_the_data(recipe: Path, tmp_path: Path) -> None:
    run_dir = prepared(recipe)
    config = resolve(recipe).recipe
    measure(run_dir, config)
    before = (run_dir / "statistics.json").read_bytes()
    measure(run_dir, config)
    assert (run_dir / "statistics.json").read_bytes() == before
    with open_tasks(config.data) as readers:
        assert set(read_statistics(run_dir, readers)) == {"wave1d", "flow2d", "darcy2d"}
    document: dict[str, Any] = json.loads(before)
    document["flow2d"]["data_identity"] = "something else"
    (run_dir / "statistics.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="the data of task 'flow2d' has changed"):
        measure(run_dir, config)


def test_checkpoints_without_a_recipe_are_not_taken_over(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has checkpoints but no config\.yaml"):
        prepared(recipe)


def test_ranks_that_copies_of_the_model_cannot_share_are_refused_before_anything_starts() -> None:
    document: dict[str, Any] = {
        "run": {"name": "a"},
        "data": {"tasks": [{"name": "a", "path": "a.zarr"}], "batch_size": 12},
        "stages": [{"type": "operator", "steps": 1}],
        "engine": {"strategy": "fsdp", "shard_ranks": 3},
    }
    check_ranks(Recipe.model_validate(document), 9)
    with pytest.raises(ConfigError, match=r"engine.shard_ranks \(3\) does not divide 4 ranks") as caught:
        check_ranks(Recipe.model_validate(document), 4)
    assert "engine.shard_ranks=1|2|4" in caught.value.hint


def test_shards_that_do_not_divide_the_ranks_are_refused_before_anything_starts() -> None:
    document: dict[str, Any] = {
        "run": {"name": "a"},
        "data": {"tasks": [{"name": "a", "path": "a.zarr"}], "batch_size": 12},
        "stages": [{"type": "operator", "steps": 1}],
        "engine": {"strategy": "fsdp", "shard_ranks": 4},
    }
    check_ranks(Recipe.model_validate(document), 4)
    check_ranks(Recipe.model_validate(document), 12)
    for ranks in (2, 6):  # fewer than a copy needs, and one copy and a half
        with pytest.raises(ConfigError, match=rf"engine\.shard_ranks \(4\) does not divide {ranks} ranks"):
            check_ranks(Recipe.model_validate(document), ranks)
    with pytest.raises(ConfigError) as caught:
        check_ranks(Recipe.model_validate(document), 6)
    assert "engine.shard_ranks=1|2|3|6" in caught.value.hint


def test_a_run_directory_with_another_place_is_a_new_run(recipe: Path, tmp_path: Path) -> None:
    run_dir = prepared(recipe)
    resolved = resolve(recipe_file(run_dir), [f"run.dir={tmp_path / 'new'}"])
    assert run_dir_of(resolved, str(run_dir), [f"run.dir={tmp_path / 'new'}"]) == tmp_path / "new"


def test_statistics_that_were_edited_in_the_cache_are_measured_again(recipe: Path, tmp_path: Path) -> None:
    config = resolve(recipe).recipe
    run_dir = prepared(recipe)
    measure(run_dir, config)
    cache = tmp_path / "wave1d.zarr.statistics.json"
    document = json.loads(cache.read_text())
    for entry in document["entries"].values():
        entry["state_std"] = [3 * value for value in entry["state_std"]]
    cache.write_text(json.dumps(document))
    before = (run_dir / "statistics.json").read_bytes()
    (run_dir / "statistics.json").unlink()
    measure(run_dir, config)
    assert (run_dir / "statistics.json").read_bytes() == before


@pytest.mark.parametrize("value", ["u:canary@h", "//u:canary@h", "http://a:b@h?token=canary", "x canary:y@z"])
def test_odd_urls_lose_their_secrets(value: str) -> None:
    assert "canary" not in kept_variables({"NCCL_SOCKET_IFNAME": value})["NCCL_SOCKET_IFNAME"]
