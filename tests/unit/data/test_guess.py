"""What is guessed about files of strangers, and that nothing of them is lost or made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray

from tests.unit.data.drawn_files import Drawn, draw_file
from ups.config.description import read_description
from ups.data.guess import Guess, description_page, guess_description
from ups.errors import ConfigError, DataError
from ups.formats.container import MemoryContainer
from ups.formats.described import DescribedReader
from ups.formats.open_container import open_container

NUM_FILES = 20
pytestmark = pytest.mark.timeout(600)  # each HDF5 file is looked at by a process of its own


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Drawn, Guess, DescribedReader]]:
    folder = tmp_path_factory.mktemp("drawn")
    guesses = []
    for seed in range(NUM_FILES):
        file = draw_file(folder, seed)
        container = open_container(file.path)
        guess = guess_description([container], "task")
        guesses.append((file, guess, DescribedReader([container], guess.description)))
    return guesses


def test_no_equation_is_made_up(drawn: list[tuple[Drawn, Guess, DescribedReader]]) -> None:
    assert [guess.description.equation for _, guess, _ in drawn] == [""] * NUM_FILES
    assert not any(guess.description.symmetries for _, guess, _ in drawn)


def test_every_parameter_is_found_with_its_values(drawn: list[tuple[Drawn, Guess, DescribedReader]]) -> None:
    for file, _, reader in drawn:
        names = [p.name for p in reader.task.parameters]
        assert len(names) == len(file.parameters), file.words
        rows = np.array([reader.read("train", i, 0, 1).parameters for i in range(reader.splits["train"])])
        for name, values in file.parameters.items():
            column = names.index(name.replace(" ", "_"))
            expected = np.broadcast_to(values, file.shape["trajectory"])[: len(rows)]
            np.testing.assert_allclose(rows[:, column], expected, rtol=1e-6, err_msg=file.words)


def test_fields_and_their_grid_are_found(drawn: list[tuple[Drawn, Guess, DescribedReader]]) -> None:
    for file, _, reader in drawn:
        assert len(reader.task.fields) == file.num_fields, file.words
        assert (sum(reader.splits.values()), reader.num_frames, *reader.space) == tuple(file.shape.values()), file.words


def test_boundary_and_time_step_are_right_in_at_least_18_of_20(
    drawn: list[tuple[Drawn, Guess, DescribedReader]],
) -> None:
    wrong = []
    for file, guess, reader in drawn:
        description = guess.description
        right = tuple(axis.boundary for axis in description.axes) == file.boundaries
        right = right and abs(reader.task.dt - file.dt) < 1e-3 * file.dt
        wrong += [] if right else [f"{file.words}: {[axis.boundary for axis in description.axes]}, dt {reader.task.dt}"]
    assert len(wrong) <= 2, wrong


def test_the_page_says_the_same_and_marks_every_guess(
    drawn: list[tuple[Drawn, Guess, DescribedReader]], tmp_path: Path
) -> None:
    for file, guess, _ in drawn:
        page = tmp_path / "task.yaml"
        page.write_text(description_page(guess, file.path.name))
        assert read_description(page) == guess.description
        assert '"y"' not in page.read_text()
        for line in page.read_text().splitlines():
            if line.strip().startswith("boundary:"):
                assert "# guess: " in line or "# check: " in line


def test_what_is_not_used_is_named() -> None:
    rng = np.random.default_rng(0)
    arrays = {"u": _waves(12, 16, 64), "forcing": rng.normal(size=(12, 16)), "seed": np.arange(12) * 7}
    notes = " ".join(guess_description([MemoryContainer(arrays)], "task").notes)
    assert "'forcing' (12, 16)" in notes
    assert "'seed' (12,)" in notes


def test_a_repeated_end_is_seen_and_left_out() -> None:
    waves = _waves(12, 16, 64)
    x = np.linspace(0, 1, 65)
    guess = guess_description([MemoryContainer({"u": np.concatenate([waves, waves[..., :1]], -1), "x": x})], "task")
    assert guess.description.axes[0].repeated_end
    reader = DescribedReader(
        [MemoryContainer({"u": np.concatenate([waves, waves[..., :1]], -1), "x": x})], guess.description
    )
    assert reader.space == (64,)
    assert reader.task.axes[0].extent == pytest.approx(1.0)


def test_mirror_images_between_walls_are_to_be_checked_and_what_is_conserved_is_that_of_the_kept_points() -> None:
    """Cells between two walls with even cosines: the ends are equal, and only all the points together keep the mean."""
    x, t = (np.arange(16) + 0.5) / 16, np.arange(20) / 200
    rng = np.random.default_rng(0)
    waves = sum(
        rng.normal(size=(12, 1, 1)) * np.exp(-4 * (np.pi * k) ** 2 * t[None, :, None] / 40) * np.cos(2 * np.pi * k * x)
        for k in (1, 2)
    )
    guess = guess_description([MemoryContainer({"u": 3.0 + waves, "x": x, "t": t})], "task")
    if guess.description.axes[0].repeated_end:
        assert "axes.0.repeated_end" in guess.uncertain
        assert "axes.0.boundary" in guess.uncertain
        assert guess.description.conserved == []
    else:
        assert guess.description.conserved == ["u"]


def test_what_does_nothing_at_the_ends_has_no_boundary() -> None:
    x, t = np.linspace(-1, 1, 64), np.arange(20) / 20
    rng = np.random.default_rng(0)
    center = rng.uniform(-0.1, 0.1, (12, 1, 1)) + 0.1 * t[None, :, None]
    guess = guess_description([MemoryContainer({"u": np.exp(-(((x - center) / 0.1) ** 2)), "x": x, "t": t})], "task")
    assert guess.description.axes[0].boundary == "unknown"
    assert "axes.0.boundary" in guess.uncertain


def test_a_conserved_field_is_seen_and_one_that_grows_is_not() -> None:
    t = np.arange(16)[None, :, None]
    waves = _waves(12, 16, 64)
    guess = guess_description([MemoryContainer({"u": waves + 1})], "task")
    assert guess.description.conserved == ["u"]
    grown = guess_description([MemoryContainer({"u": waves + 1 + 0.01 * t})], "task")
    assert grown.description.conserved == []


def test_one_long_simulation_is_cut() -> None:
    guess = guess_description(
        [MemoryContainer({"u": _waves(1, 400, 64)[0], "t": np.arange(400) * 0.5, "x": np.arange(64)})], "task"
    )
    assert guess.description.dims == ["time", "x"]
    assert guess.description.cut_frames == 20
    assert "cut_frames" in guess.uncertain


def test_a_channel_dimension_gives_separate_fields() -> None:
    both = np.stack([_waves(12, 16, 64), 3 + _waves(12, 16, 64, seed=1)], axis=-1)
    guess = guess_description([MemoryContainer({"data": both})], "task")
    assert guess.description.dims == ["trajectory", "time", "x", "channel"]
    assert [f.name for f in guess.description.fields] == ["data_0", "data_1"]


def test_what_has_no_field_is_refused() -> None:
    with pytest.raises(DataError, match="no array with two dimensions"):
        guess_description([MemoryContainer({"x": np.arange(5.0)})], "task")


def _waves(count: int, frames: int, points: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x, t = np.arange(points) / points, np.arange(frames) / max(16, frames // 8)
    phase, speed = rng.uniform(0, 1, (2, count, 1, 1))
    position = x + phase + 0.3 * speed * t[None, :, None]
    return np.asarray(np.sin(2 * np.pi * position) + 0.3 * np.cos(6 * np.pi * (position + phase)))


@pytest.mark.parametrize(
    ("order", "channels", "dims"),
    [
        ("NTX", 0, ["trajectory", "time", "x"]),
        ("TNX", 0, ["time", "trajectory", "x"]),
        ("NTXY", 0, ["trajectory", "time", "x", "y"]),
        ("NTXYC", 2, ["trajectory", "time", "x", "y", "channel"]),
        ("NTCXY", 3, ["trajectory", "time", "channel", "x", "y"]),
        ("NCTX", 2, ["trajectory", "channel", "time", "x"]),
    ],
)
def test_an_array_alone_shows_what_its_dimensions_are(order: str, channels: int, dims: list[str]) -> None:
    fields = [_waves(20, 24, 32, seed) + seed for seed in range(max(1, channels))]  # (N, T, X)
    here = "NTX"
    if "Y" in order:
        fields = [f[..., None] * _waves(20, 24, 28, 9 + n)[:, :, None] for n, f in enumerate(fields)]
        here += "Y"
    array = np.stack(fields, axis=-1) if channels else fields[0]
    here += "C" if channels else ""
    array = array.transpose([here.index(letter) for letter in order])
    guess = guess_description([MemoryContainer({"u": array})], "task")
    assert guess.description.dims == dims
    assert "dims" in guess.uncertain
    assert len(guess.description.fields) == max(1, channels)


def test_a_small_change_of_a_large_mean_is_no_conservation() -> None:
    t = np.arange(16)[None, :, None]
    guess = guess_description([MemoryContainer({"u": _waves(12, 16, 64) + 300 + 1e-3 * t})], "task")
    assert guess.description.conserved == []


def test_a_boundary_that_is_not_seen_is_a_line_to_edit(tmp_path: Path) -> None:
    rough = np.cumsum(np.random.default_rng(0).normal(size=(12, 16, 64)), axis=1)
    rough = np.cumsum(rough, axis=2)
    page = description_page(guess_description([MemoryContainer({"u": rough})], "task"), "rough.npy")
    assert "boundary: unknown # check: " in page


def test_each_file_of_a_list_keeps_its_own_time_step() -> None:
    waves = _waves(12, 41, 64)
    files = [
        MemoryContainer({"u": u, "x": np.arange(64), "t": np.arange(41) * (0.05 if i < 6 else 0.1)})
        for i, u in enumerate(waves)
    ]
    guess = guess_description(files, "task")
    assert guess.description.dt is None
    assert "0.05 to 0.1" in guess.reasons["times"]
    reader = DescribedReader(files, guess.description)
    assert [reader.dt_in("train", 0), reader.dt_in("test", 0)] == pytest.approx([0.05, 0.1])


def test_numbers_that_differ_between_files_are_to_be_looked_at() -> None:
    waves = _waves(12, 41, 64)
    files = [MemoryContainer({"u": u, "dt": 0.05 if i < 6 else 0.1, "L": 2.0}) for i, u in enumerate(waves)]
    guess = guess_description(files, "task")
    assert "dt" in guess.uncertain
    assert "other files say otherwise" in guess.reasons["dt"]
    assert "axes.0.extent" in guess.sure
    zero = [MemoryContainer({"u": u, "t": np.arange(41), "nu": 0.1 * i}) for i, u in reversed(list(enumerate(waves)))]
    assert guess_description(zero, "task").description.parameters[0].scale == "linear"


def test_files_of_different_length_are_looked_at_and_cut_by_the_shortest() -> None:
    waves = _waves(12, 60, 64)
    files = [MemoryContainer({"u": u[: 60 if i == 3 else 41]}) for i, u in enumerate(waves)]
    assert guess_description(files, "task").description.cut_frames is None
    few = [MemoryContainer({"u": u[: 60 if i == 1 else 30]}) for i, u in enumerate(_waves(3, 60, 64))]
    cut = guess_description(few, "task").description.cut_frames
    assert cut is not None
    assert cut <= 30


def test_a_number_for_each_trajectory_is_no_field_where_sizes_agree() -> None:
    rng = np.random.default_rng(0)
    arrays = {"u": _waves(64, 20, 64), "x": np.arange(64), "t": np.arange(20) * 0.1, "nu": rng.uniform(1, 2, 64)}
    guess = guess_description([MemoryContainer(arrays)], "task")
    assert [f.name for f in guess.description.fields] == ["u"]
    assert [p.name for p in guess.description.parameters] == ["nu"]
    assert "parameters.0.name" in guess.uncertain


def test_times_are_no_field_where_sizes_agree_and_the_choice_is_to_be_looked_at() -> None:
    arrays = {"u": _waves(12, 64, 64), "x": np.arange(64), "t": np.arange(64) * 0.1}
    guess = guess_description([MemoryContainer(arrays)], "task")
    assert [f.name for f in guess.description.fields] == ["u"]
    assert guess.description.times == "t"
    assert "dims" in guess.uncertain
    assert "also fits dimension 3" in guess.reasons["dims"]


@pytest.mark.parametrize(
    ("numbers", "extent", "sure"),
    [
        ({"xmin": -3.2, "xmax": 3.2}, 6.4, True),
        ({"xmax": 3.2}, 3.2, False),
        ({"dx": 0.1}, 6.4, True),
        ({"x_length": 5.0, "xmax": 3.2}, 5.0, True),
    ],
)
def test_the_length_of_an_axis(numbers: dict[str, float], extent: float, sure: bool) -> None:
    guess = guess_description([MemoryContainer({"u": _waves(12, 16, 64)} | numbers)], "task")
    assert guess.description.axes[0].extent == pytest.approx(extent)
    assert ("axes.0.extent" in guess.sure, "axes.0.extent" in guess.uncertain) == (sure, not sure)


def test_the_length_of_an_axis_that_repeats_its_end() -> None:
    waves = _waves(12, 16, 64)
    ring = np.concatenate([waves, waves[..., :1]], -1)
    guess = guess_description([MemoryContainer({"u": ring, "dx": 0.1})], "task")
    assert guess.description.axes[0].repeated_end
    assert guess.description.axes[0].extent == pytest.approx(6.4)


def test_a_time_step_that_the_end_time_contradicts_is_to_be_looked_at() -> None:
    waves = _waves(12, 41, 64)
    for end, look in ((2.0, True), (0.04, False), (0.041, False)):
        guess = guess_description([MemoryContainer({"u": waves, "dt": 1e-3, "t_end": end})], "task")
        assert guess.description.dt == 1e-3
        assert ("dt" in guess.uncertain) == look


def test_a_parameter_called_like_a_field_or_an_axis_has_a_name_of_its_own() -> None:
    drift = np.array([1.0, 1.7, 1.2, 3.0, 2.0, 5.0, 4.0, 2.2])
    position = np.arange(32) / 32 - 0.01 * drift[:, None, None] * np.arange(12)[:, None]
    fields = np.sin(2 * np.pi * position)
    container = MemoryContainer({"u": fields, "run/u": drift, "run/x": 3 * drift})
    description = guess_description([container], "task").description
    assert [(p.name, p.dataset) for p in description.parameters] == [("u_", "run/u"), ("x_", "run/x")]


def _in_other_words(axis: str, moment: str, number: str) -> dict[str, np.ndarray]:
    """Diffusion on a ring as (x, time, trajectory), with coordinates and a coefficient under names of one's own."""
    rng = np.random.default_rng(0)
    x, t = np.arange(64) / 64, np.arange(25) * 0.02
    rate, phase = rng.uniform(0.5, 2, 40), rng.uniform(0, 1, 40)
    slow = np.exp(-rate * t[:, None])[None] * np.sin(2 * np.pi * (x[:, None, None] + phase))
    fast = np.exp(-4 * rate * t[:, None])[None] * np.cos(4 * np.pi * (x[:, None, None] + 3 * phase))
    return {"u": slow + fast + 2, axis: 0.3 + x, moment: t, number: rate}


@pytest.mark.parametrize(
    ("name", "moment", "number"), [("ort", "zeit", "Dcoef"), ("abscisse", "temps", "D"), ("aa", "bb", "cc")]
)
def test_what_rises_along_one_dimension_is_its_coordinate(name: str, moment: str, number: str) -> None:
    guess = guess_description([MemoryContainer(_in_other_words(name, moment, number))], "task")
    description = guess.description
    axis = "aa" if name == "aa" else "x"
    assert description.dims == [axis, "time", "trajectory"]
    assert "dims" in guess.uncertain
    assert [f.name for f in description.fields] == ["u"]
    assert (description.axes[0].dataset, description.times) == (name, moment)
    assert [p.name for p in description.parameters] == [number]
    assert description.axes[0].boundary == "periodic"
    assert description.conserved == ["u"]


def test_units_decide_where_names_say_nothing() -> None:
    arrays = _in_other_words("aa", "bb", "cc")
    dataset = xarray.Dataset({name: (tuple(f"{name}_{n}" for n in range(v.ndim)), v) for name, v in arrays.items()})
    dataset["aa"].attrs["units"], dataset["bb"].attrs["long_name"] = "mm", "time"
    guess = guess_description([MemoryContainer(dataset)], "task")
    assert guess.description.dims == ["aa", "time", "trajectory"]
    assert guess.description.times == "bb"


def test_a_sorted_number_for_each_trajectory_is_no_coordinate() -> None:
    arrays = {"u": _waves(20, 24, 32), "x": np.arange(32), "nu": np.linspace(0.1, 2, 20)}
    for order in ((0, 1, 2), (2, 0, 1)):
        guess = guess_description([MemoryContainer(arrays | {"u": arrays["u"].transpose(order)})], "task")
        assert sorted(guess.description.dims or []) == ["time", "trajectory", "x"]
        assert [p.name for p in guess.description.parameters] == ["nu"]
    sweep = np.sin(
        np.arange(32) / 32 * 2 * np.pi + np.linspace(0.1, 2, 20)[:, None, None] * np.arange(24)[:, None] / 24
    )
    guess = guess_description([MemoryContainer(arrays | {"u": sweep})], "task")
    assert guess.description.dims == ["trajectory", "time", "x"]
    assert [p.name for p in guess.description.parameters] == ["nu"]


def test_dims_that_a_person_gives_are_taken_and_the_rest_is_guessed_from_them() -> None:
    arrays = _in_other_words("aa", "bb", "cc")
    guess = guess_description([MemoryContainer(arrays)], "task", ["place", "time", "trajectory"])
    description = guess.description
    assert description.dims == ["place", "time", "trajectory"]
    assert "dims" in guess.sure
    assert (description.axes[0].name, description.axes[0].dataset, description.times) == ("place", "aa", "bb")
    assert description.axes[0].boundary == "periodic"
    assert [p.name for p in description.parameters] == ["cc"]
    with pytest.raises(ConfigError, match="has 3 dimensions"):
        guess_description([MemoryContainer(arrays)], "task", ["x", "time"])
    with pytest.raises(ConfigError, match="'x' is named twice"):
        guess_description([MemoryContainer(arrays)], "task", ["x", "time", "x"])


def test_numbered_arrays_of_unequal_length_are_not_dropped() -> None:
    waves = _waves(12, 24, 32)
    with pytest.raises(DataError, match=r"'u0', 'u1' and 10 more .* 13 to 24 entries") as caught:
        guess_description([MemoryContainer({f"u{i}": u[: 24 - i] for i, u in enumerate(waves)})], "task")
    assert "run_*.npy" in str(caught.value.hint)
    fields = {f"u{i}": waves + i for i in range(3)}  # of equal length they are fields
    assert len(guess_description([MemoryContainer(fields)], "task").description.fields) == 3
