"""Latents on disk are those of the encoder, are read like it was run, and are refused when they are not."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.latents import latent_recipe, write_encoder, write_latents
from tests.support.mixture import MODELS, write_mixture
from ups.config.schema import Recipe
from ups.data import latent_cache
from ups.data.latent_cache import CACHE_NAME, LatentCache, as_float32, as_stored, open_cache, partial_path
from ups.errors import ConfigError, DataError, DiskFullError
from ups.record.manifest import COMMITTED_NAME, commit_directory, make_temporary, read_manifest, verify
from ups.run.assemble import OpenData, bare_stage, cache_key, open_data, stage_loader
from ups.run.latent_caching import (
    encoder_hash,
    frozen_stepper,
    measure_gain,
    rounding_error,
    stage_to_cache,
    write_cache,
    writer_for,
)
from ups.spec.batch import Batch, RankInfo
from ups.training.stages import LatentOperatorStage

ALONE = RankInfo(0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latents")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> list[dict[str, Any]]:
    return write_mixture(folder)


@pytest.fixture(scope="module")
def recipe(folder: Path, tasks: list[dict[str, Any]]) -> Recipe:
    return Recipe.model_validate(latent_recipe(folder, tasks))


@pytest.fixture(scope="module")
def opened(folder: Path, recipe: Recipe) -> Iterator[OpenData]:
    with open_data(recipe) as data:
        write_encoder(folder, recipe, data)
        yield data


@pytest.fixture(scope="module")
def cache(folder: Path, recipe: Recipe, opened: OpenData) -> LatentCache:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_cache, "FILE_BYTES", 1500)  # several files for each task
        return write_latents(recipe, opened, folder / "latents").cache


@pytest.fixture
def copied(cache: LatentCache, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cache.root, tmp_path / "latents"))


def changed(recipe: Recipe, **stage: Any) -> Recipe:
    data = recipe.model_dump(mode="json")
    data["stages"][0] |= stage
    return Recipe.model_validate(data)


def stage_of(recipe: Recipe, opened: OpenData) -> LatentOperatorStage:
    stepper = frozen_stepper(recipe, opened, 0)
    _, stage = bare_stage(recipe, opened, 0)
    assert isinstance(stage, LatentOperatorStage)
    stage.stepper.load_state_dict(stepper.state_dict())
    return stage


def batches(recipe: Recipe, opened: OpenData, count: int = 9) -> list[Batch]:
    _, stage = bare_stage(recipe, opened, 0)
    with stage_loader(recipe, opened, ALONE, 0, stage) as loader:
        return [next(loader)[0] for _ in range(count)]


def test_latents_of_every_window_are_those_of_the_encoder(recipe: Recipe, opened: OpenData, cache: LatentCache) -> None:
    assert all(task.num_files > 1 for task in cache.tasks)
    stage = stage_of(recipe, opened)
    seen = set()
    for batch in batches(recipe, opened):
        seen.add(batch.task.name)
        encoded = stage.latents(replace(batch, extra={}))
        torch.testing.assert_close(batch.extra["latents"], torch.stack(encoded, dim=1), rtol=1e-5, atol=1e-5)
    assert len(seen) == 3


@pytest.mark.parametrize("decode_weight", [0.0, 1.0])
def test_losses_from_the_cache_are_those_of_encoding(
    recipe: Recipe, opened: OpenData, cache: LatentCache, decode_weight: float
) -> None:
    from_cache = changed(recipe, augment=False, decode_weight=decode_weight)
    encoding = changed(recipe, augment=False, decode_weight=decode_weight, cache=None)
    stage = stage_of(from_cache, opened)
    for cached, fresh in zip(batches(from_cache, opened), batches(encoding, opened), strict=True):
        assert cached.numbers.tolist() == fresh.numbers.tolist()
        assert (cached.state.shape == fresh.state.shape) == (decode_weight > 0 or cached.task.steady)
        assert (cached.target.numel() > 0) == (decode_weight > 0 and cached.task.steady)
        torch.testing.assert_close(cached.parameters, fresh.parameters)
        torch.testing.assert_close(cached.dt, fresh.dt)
        first, second = stage([cached]), stage([fresh])
        torch.testing.assert_close(first.total, second.total, rtol=1e-5, atol=1e-5)
        assert first.metrics.keys() == second.metrics.keys()


def test_kept_latents_are_moved_by_whole_patches_together_with_their_fields(
    recipe: Recipe, opened: OpenData, cache: LatentCache
) -> None:
    stage = stage_of(recipe, opened)
    moved = 0
    for batch in batches(recipe, opened):
        prepared = stage.prepare(batch, augment=True)
        encoded = torch.stack(stage.latents(replace(prepared, extra={})), dim=1)
        torch.testing.assert_close(prepared.extra["latents"], encoded, rtol=1e-5, atol=1e-5)
        moved += batch.task.name == "wave1d" and not torch.equal(batch.state, prepared.state)
        if batch.task.name != "wave1d":  # the others declare no symmetry
            assert torch.equal(batch.state, prepared.state)
    assert moved


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_the_bytes_are_read_back_within_the_stated_error(
    dtype: str, recipe: Recipe, opened: OpenData, cache: LatentCache, tmp_path: Path
) -> None:
    half = write_latents(recipe, opened, tmp_path / dtype, dtype)
    assert half.num_bytes * 2 == sum(4 * t.num_latents * int(np.prod(t.shape)) for t in cache.tasks)
    for number, task in enumerate(cache.tasks):
        count = 2 if task.name == "darcy2d" else 3
        exact, rounded = (c.latents(number, [1, 4], [0, 0], count) for c in (cache, half.cache))
        error = rounding_error(exact[:, :2], dtype, changes=task.name != "darcy2d")
        relative = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
        assert 0 < relative < 2 * error.of_latent
        assert error.of_latent < {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
        assert error.of_change is None or error.of_change > error.of_latent


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.concatenate([np.random.default_rng(0).normal(size=1000), [0.0, -0.0, 1e-30, 3e38, 1.00390625]])
    values = values.astype(np.float32)
    expected = torch.from_numpy(values).bfloat16()
    stored = as_stored(values, "bfloat16")
    assert np.array_equal(stored.view(np.int16), expected.view(torch.int16).numpy())
    assert np.array_equal(as_float32(stored, "bfloat16"), expected.float().numpy())


class TestRefusals:
    """Each says which: half-written, truncated, foreign, wrong dtype, stale."""

    def refused(self, recipe: Recipe, opened: OpenData, root: Path, **key: Any) -> str:
        with pytest.raises(DataError) as caught:
            open_cache(root, opened.readers, cache_key(recipe, opened, 0).model_copy(update=key))
        assert caught.value.hint
        return caught.value.message

    def test_the_right_one_is_opened(self, recipe: Recipe, opened: OpenData, copied: Path) -> None:
        key = cache_key(recipe, opened, 0, encoder=encoder_hash(frozen_stepper(recipe, opened, 0)))
        assert open_cache(copied, opened.readers, key).dtype == "float32"

    def test_absent(self, recipe: Recipe, opened: OpenData, tmp_path: Path) -> None:
        assert "does not exist" in self.refused(recipe, opened, tmp_path / "none")

    def test_half_written(self, recipe: Recipe, opened: OpenData, copied: Path) -> None:
        (copied / COMMITTED_NAME).unlink()
        assert "half-written" in self.refused(recipe, opened, copied)
        partial_path(copied).mkdir()
        shutil.rmtree(copied)
        assert "half-written" in self.refused(recipe, opened, copied)

    def test_truncated(self, recipe: Recipe, opened: OpenData, copied: Path) -> None:
        file = sorted(copied.glob("flow2d/*.bin"))[0]
        with file.open("r+b") as short:
            short.truncate(file.stat().st_size - 4)
        assert "truncated" in (message := self.refused(recipe, opened, copied))
        assert file.name in message

    def test_missing_file(self, recipe: Recipe, opened: OpenData, copied: Path) -> None:
        sorted(copied.glob("wave1d/*.bin"))[0].unlink()
        assert "truncated or damaged" in self.refused(recipe, opened, copied)

    def test_a_changed_byte_is_found_by_the_full_check(self, recipe: Recipe, opened: OpenData, copied: Path) -> None:
        file = sorted(copied.glob("flow2d/*.bin"))[0]
        content = bytearray(file.read_bytes())
        content[5] ^= 1
        file.write_bytes(content)
        open_cache(copied, opened.readers, cache_key(recipe, opened, 0))  # cheap: names and sizes
        with pytest.raises(DataError, match=f"damaged.*{file.name}"):
            latent_cache.read_document(copied, deep=True)

    def test_wrong_dtype(self, recipe: Recipe, opened: OpenData, copied: Path) -> None:
        wanted = changed(recipe, cache_dtype="bfloat16")
        message = self.refused(wanted, opened, copied)
        assert "wrong dtype: it holds float32, and bfloat16 is asked for" in message

    def test_foreign_directory(self, recipe: Recipe, opened: OpenData, tmp_path: Path, folder: Path) -> None:
        assert "foreign" in self.refused(recipe, opened, tmp_path)
        assert "foreign" in self.refused(recipe, opened, folder / "encoder")

    def test_foreign_document(self, recipe: Recipe, opened: OpenData, copied: Path) -> None:
        for content in ({"format": "other"}, {"format": latent_cache.FORMAT, "version": 1, "key": {}}):
            temporary = make_temporary(copied)
            (temporary / CACHE_NAME).write_text(json.dumps(content))
            commit_directory(temporary, copied)
            assert "foreign" in self.refused(recipe, opened, copied)

    def test_foreign_tasks_and_settings(self, recipe: Recipe, opened: OpenData, copied: Path) -> None:
        assert "foreign: it is of the tasks darcy2d, flow2d, wave1d" in self.refused(
            recipe, opened, copied, tasks={"other": ("", "")}
        )
        assert "foreign: it is of a model" in self.refused(recipe, opened, copied, model={"type": "other"})
        assert "foreign" in self.refused(recipe, opened, copied, context_frames=2)

    def test_stale(self, recipe: Recipe, opened: OpenData, copied: Path) -> None:
        known = cache_key(recipe, opened, 0).tasks
        data = dict(known) | {"wave1d": ("0" * 64, known["wave1d"][1])}
        assert "stale: it is of other data of task 'wave1d'" in self.refused(recipe, opened, copied, tasks=data)
        numbers = dict(known) | {"wave1d": (known["wave1d"][0], "0" * 64)}
        assert "stale: the statistics of task 'wave1d'" in self.refused(recipe, opened, copied, tasks=numbers)
        assert "stale: it is of an encoder" in self.refused(recipe, opened, copied, encoder="0" * 64)


def test_the_key_follows_every_weight_of_the_encoder_and_no_other(recipe: Recipe, opened: OpenData) -> None:
    stepper = frozen_stepper(recipe, opened, 0)
    before = encoder_hash(stepper)
    with torch.no_grad():
        for name, parameter in stepper.latent.named_parameters():
            parameter.flatten()[-1:].add_(1e-3)
            after = encoder_hash(stepper)
            assert (after != before) == name.startswith("encoder."), name
            before = after


class TestWriting:
    def test_a_cache_that_is_there_is_kept_and_another_is_replaced_only_if_asked(
        self, recipe: Recipe, opened: OpenData, copied: Path
    ) -> None:
        before = read_manifest(copied).sha256
        assert write_latents(recipe, opened, copied).kept
        with pytest.raises(ConfigError, match="another cache") as caught:
            write_latents(recipe, opened, copied, "float16")
        assert "--overwrite" in caught.value.hint
        assert read_manifest(copied).sha256 == before
        replaced = write_latents(recipe, opened, copied, "float16", overwrite=True)
        assert not replaced.kept
        assert verify(copied).sha256 == replaced.cache.manifest != before

    def test_what_is_no_whole_cache_is_never_replaced(
        self, recipe: Recipe, opened: OpenData, copied: Path, folder: Path
    ) -> None:
        (copied / COMMITTED_NAME).unlink()
        for target in (copied, folder / "encoder", folder / "wave1d.zarr"):
            before = sorted(path.name for path in target.rglob("*"))
            with pytest.raises(ConfigError, match="is in the way") as caught:
                write_latents(recipe, opened, target, "float16", overwrite=True)
            assert "remove it yourself" in caught.value.hint
            assert sorted(path.name for path in target.rglob("*")) == before

    def test_what_is_finished_is_not_encoded_again(
        self, recipe: Recipe, opened: OpenData, cache: LatentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(latent_cache, "FILE_BYTES", 1500)
        root = tmp_path / "latents"

        class Stop(Exception):
            pass

        def stop(done: int, total: int) -> None:
            if done == 3:
                raise Stop

        with pytest.raises(Stop):
            write_latents(recipe, opened, root, progress=stop)
        assert not root.exists()
        content = partial_path(root) / "content"
        first = sorted(content.rglob("*.bin"))
        assert len(first) == 3
        first[0].write_bytes(first[0].read_bytes()[:-1])  # not of its size: written again
        seen: list[tuple[int, int]] = []
        written = write_latents(recipe, opened, root, progress=lambda *counts: seen.append(counts))
        assert seen[0][0] == 2
        assert seen[-1][0] == seen[-1][1]
        assert verify(root).sha256 == written.cache.manifest == cache.manifest
        assert not partial_path(root).exists()

    def test_files_of_another_encoder_are_not_mixed_in(
        self, recipe: Recipe, opened: OpenData, cache: LatentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(latent_cache, "FILE_BYTES", 1500)
        root = tmp_path / "latents"
        content = partial_path(root) / "content"
        for task in cache.tasks:
            (content / task.name).mkdir(parents=True)
            size = (Path(cache.root) / task.file_name(0)).stat().st_size
            (content / task.file_name(0)).write_bytes(bytes(size))
        (partial_path(root) / "key.json").write_text('{"hash": "other"}')
        assert write_latents(recipe, opened, root).cache.manifest == cache.manifest

    def test_two_writers_at_once(self, recipe: Recipe, opened: OpenData, tmp_path: Path) -> None:
        partial = partial_path(tmp_path / "latents")
        partial.mkdir()
        with (partial / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(ConfigError, match="another process"):
                write_latents(recipe, opened, tmp_path / "latents")

    @pytest.mark.parametrize("kind", ["disk", "RAM disk"])
    def test_a_disk_that_is_too_small_is_noticed_before_the_work(
        self, kind: str, recipe: Recipe, opened: OpenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if kind == "disk":
            usage = shutil.disk_usage(tmp_path)
            monkeypatch.setattr(latent_cache.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        else:
            monkeypatch.setattr(latent_cache, "_file_system", lambda path: "tmpfs")
            monkeypatch.setattr(latent_cache, "_available_memory", lambda: 1000)
        with pytest.raises(DiskFullError, match=rf"\({kind}\) has 0.00 GB free"):
            write_latents(recipe, opened, tmp_path / "latents")
        assert not list(tmp_path.iterdir())

    def test_latents_that_float16_cannot_hold(self, recipe: Recipe, opened: OpenData, tmp_path: Path) -> None:
        stepper = frozen_stepper(recipe, opened, 0)
        with torch.no_grad():
            stepper.latent.encoder.table.mul_(1e8)
        writer = writer_for(tmp_path / "latents", cache_key(recipe, opened, 0, dtype="float16"), stepper, opened)
        with pytest.raises(DataError, match="is not finite as float16") as caught:
            write_cache(writer, stepper, opened)
        assert "bfloat16" in caught.value.hint


def test_it_is_said_whether_a_cache_pays(folder: Path, tasks: list[dict[str, Any]], opened: OpenData) -> None:
    gains = {}
    for name in ("latent_operator", "deep_encoder"):
        data = latent_recipe(folder, tasks)
        data["model"] = MODELS[name] | ({"width": 64} if name == "latent_operator" else {"encoder_blocks": 16})
        recipe = Recipe.model_validate(data)
        stepper, _ = bare_stage(recipe, opened, 0)
        writer = writer_for(folder / name, cache_key(recipe, opened, 0), stepper, opened)
        gain = measure_gain(stepper, list(opened.readers), writer.tasks, recipe.stages[0], "float32", writer.num_bytes)
        ratio = gain.encoder_seconds / gain.operator_seconds
        assert 1 + 2 * ratio / 3 > gain.factor > 1  # two steps of the operator for three latents
        gains[name] = gain
    assert "times as large as the fields" in gains["latent_operator"].verdict
    assert gains["deep_encoder"].pays
    assert "expected" in gains["deep_encoder"].verdict
    poor = replace(gains["latent_operator"], factor=1.05)
    assert "does not pay" in poor.verdict


def test_a_recipe_without_an_encoder_has_nothing_to_keep(recipe: Recipe) -> None:
    assert stage_to_cache(recipe) == 0
    with pytest.raises(ConfigError, match="no stage"):
        stage_to_cache(changed(recipe, space="physical", cache=None))
