"""The report is one file that opens from disk and says what was scored."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.memory_reader import MemoryReader
from ups.evaluation.ensemble import EnsembleScores
from ups.evaluation.figures import Example, examples
from ups.evaluation.results import paired_difference, task_result, to_json
from ups.evaluation.rollout import RolloutPlan, references, score_task
from ups.spec.batch import RankInfo
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

pytest.importorskip("matplotlib")


def almost(batch):
    if batch.task.steady:
        return batch.static * 1.01 + 0.5
    return batch.state[:, -1].roll(1, -1) * 0.99


@pytest.fixture(scope="module")
def page() -> str:
    from ups.evaluation.report import write_report

    results, pictures = [], {}
    for reader in (MemoryReader(), MemoryReader(points=8, steady=True)):
        plan = RolloutPlan.whole(reader, 1)
        scores = score_task({"model": almost, **references(reader, plan)}, reader, RankInfo(0, 1), plan)
        steps = score_task({"model": almost, **references(reader, plan)}, reader, RankInfo(0, 1), plan, kind="one_step")
        results.append(task_result(reader, plan, "test", scores, "model", steps))
        pictures[reader.task.name] = examples(almost, reader, plan, scores["model"].worst(2))
    members = EnsembleScores(2, 0, 5, ("u",), None)
    for step in range(5):
        members.add(step, torch.ones(1, 2, 1, 4), torch.ones(1, 1, 4), torch.zeros(1, 1, 4), torch.ones(1, 1))
    results[0]["ensemble"] = members.result()
    json.dumps(to_json(results), allow_nan=False)
    return write_report(results, pictures, title="A <run>", identity={"recipe": "abc"}, config_text="run:\n  name: <x>")


def test_the_page_needs_nothing_from_outside(page):
    addresses = re.findall(r"(?:src|href)=['\"]([^'\"]{1,40})", page)
    assert addresses
    assert all(a.startswith(("data:", "#")) for a in addresses)
    assert not re.findall(r"<(?:script|link|iframe)", page)


def test_names_from_recipes_and_files_are_escaped(page):
    assert "A &lt;run&gt;" in page
    assert "name: &lt;x&gt;" in page


def test_the_page_shows_references_films_and_protocol(page):
    for text in ("persistence", "training mean", "data:video/mp4", "last given frame 0", "5 trajectories", "<b>"):
        assert text in page


def test_the_page_draws_errors_over_time_and_spectra_with_the_truth(page):
    titles = (">Error relative to the trajectory<", ">nRMSE<", "Spectrum of u, step 5", ">truth<")
    for text in titles:
        assert text in page
    assert page.index(titles[0]) < page.index(titles[1])


def test_the_page_shows_an_ensemble_with_ranks_and_spread(page):
    for text in ("Ensemble of 2 members", ">Spread and skill<", ">Rank of the truth among the members<"):
        assert page.count(text) == 1


def test_a_chart_of_nothing_finite_is_drawn():
    from ups.evaluation.report import curve_figure, spectrum_figure

    assert "<svg" in curve_figure({"model": [math.inf, math.inf]}, "t", "y", "x")
    assert "<svg" in spectrum_figure([1.0, 0.0, 0.0], {"model": [math.inf] * 3}, "t")


def test_round_off_does_not_squeeze_a_spectrum():
    from ups.evaluation.report import spectrum_figure

    drawn = spectrum_figure([0.0, 1.0, 1e-16, 1e-3], {"model": [0.0, 0.5, 1e-5, 2e-16]}, "t")
    exponents = {int(exponent) for exponent in re.findall(r"\{10\^\{(-?\d+)\}\}", drawn)}  # as comments name the ticks
    assert min(exponents) == -5, "of the smallest energy that is more than round-off"


def test_a_narrow_window_hides_no_column_without_a_word(page):
    assert "more columns: scroll sideways" in page
    assert 'data-head="the model is"' in page


def test_a_difference_knows_its_uncertainty():
    ours = {t: 0.1 + 0.001 * t for t in range(20)}
    theirs = {t: value + 0.05 for t, value in ours.items()}
    difference = paired_difference(ours, theirs)
    assert difference["mean"] == pytest.approx(-0.05)
    assert difference["low"] == pytest.approx(-0.05)
    assert paired_difference({0: math.inf}, {0: 1.0})["mean"] == math.inf


@pytest.mark.parametrize(
    ("dims", "with_truth", "name"),
    [*((n, t, "film.mp4") for n in (1, 2, 3) for t in (True, False)), (1, True, "film.gif"), (2, False, "film.gif")],
)
def test_a_film_shows_fields_that_move(tmp_path, dims, with_truth, name):
    """Every frame is decoded and looked at: the panels of a film can be empty, and everything around them right."""
    imageio = pytest.importorskip("imageio.v3")
    from ups.evaluation.figures import film

    space = tuple(np.meshgrid(*[np.arange(8) / 8] * dims, indexing="ij"))
    waves = np.stack([np.sin(2 * np.pi * (space[0] - 0.2 * step)) for step in range(3)])[:, None]
    task = TaskSpec("wave", (FieldSpec("u", unit="m"),), tuple(AxisSpec(n) for n in "xyz"[:dims]), dt=0.1)
    grid = (np.arange(8) / 8,) * dims
    example = Example(task, 0, 0.1, 0.1, ("u",), ("m",), grid, waves, 1.1 * waves if with_truth else None)
    (tmp_path / name).write_bytes(film(example, 0, gif=name.endswith(".gif")))
    frames = imageio.imread(tmp_path / name)[:3].astype(int)
    assert len(frames) == 3
    inside = frames[:, 100:-100, 120:300]  # of the first panel, right of the numbers of its axis
    assert (np.abs(inside - 255).max(axis=-1) > 40).mean() > (0.005 if dims == 1 else 0.2), "an empty panel"
    assert (np.abs(np.diff(inside, axis=0)) > 40).mean() > 0.001, "nothing moves"


def test_a_picture_of_a_cube_says_which_plane_it_shows():
    from ups.evaluation import figures

    task = TaskSpec("cube", (FieldSpec("u"),), tuple(AxisSpec(name) for name in "xyz"), dt=0.1)
    grid = (np.arange(8) / 8,) * 3
    example = Example(task, 0, 0.1, 0.1, ("u",), ("m",), grid, np.zeros((2, 1, 8, 8, 8)), None)
    assert figures._title(example, 0) == "cube: u, plane z = 0.5, trajectory 0"


def saturated(reach: float) -> Example:
    """A truth between 0 and 1, and a prediction that goes up to `reach`."""
    task = TaskSpec("wave", (FieldSpec("u"),), (AxisSpec("x"),), dt=0.1)
    x = np.linspace(0, 1, 16, endpoint=False)
    truth = np.linspace(0, 1, 16) * np.ones((5, 1, 1))
    return Example(task, 0, 0.1, 0.1, ("u",), ("1",), (x,), truth * reach, truth)


def test_a_prediction_that_leaves_the_color_scale_is_marked():
    from ups.evaluation import figures

    little, far = saturated(1.05), saturated(2.0)
    assert figures._limits(little, 0) == (0.0, 1.05)
    assert figures._panel(little, 0, "prediction") == "prediction"
    assert figures._limits(far, 0) == pytest.approx((0.0, 1.1))
    assert figures._panel(far, 0, "prediction") == "prediction\n0 to 2"
    assert figures._panel(far, 0, "truth") == "truth"
    assert (figures._tips(far, 0, "prediction"), figures._tips(far, 0, "error")) == ("max", "neither")


def test_the_color_beyond_the_scale_is_in_the_picture(tmp_path):
    imageio = pytest.importorskip("imageio.v3")
    from ups.evaluation.figures import ABOVE, fields_png

    color = np.array([int(ABOVE[i : i + 2], 16) for i in (1, 3, 5)])
    for reach, least in ((1.05, 0), (2.0, 1000)):
        (tmp_path / "p.png").write_bytes(fields_png(saturated(reach), 0))
        pixels = imageio.imread(tmp_path / "p.png")[..., :3].astype(int)
        count = int((np.abs(pixels - color).max(axis=-1) < 8).sum())
        assert count > least if least else count == 0


def test_colors_that_are_not_on_the_scale_are_explained_where_they_are_drawn():
    from ups.evaluation import figures

    def explained(example: Example, shown: np.ndarray) -> list[str]:
        figure = figures.pyplot().figure(layout="constrained")
        figures._explain_colors(figure, example, 0, shown)
        texts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        figures.pyplot().close(figure)
        return texts

    far = saturated(2.0)
    assert explained(saturated(1.05), saturated(1.05).prediction) == []
    assert explained(far, far.prediction) == ["above the scale of the truth"]
    assert explained(far, far.prediction[..., :4]) == [], "the part that is drawn is on the scale"
    assert explained(far, np.array([-3.0, math.nan])) == ["below the scale of the truth", "not a finite number"]


@pytest.mark.parametrize("with_truth", [True, False])
def test_frames_that_have_diverged_are_marked_and_set_no_scale(tmp_path, with_truth):
    imageio = pytest.importorskip("imageio.v3")
    from dataclasses import replace

    from ups.evaluation import figures

    sound = saturated(1.0)
    prediction = sound.prediction.copy()
    prediction[3:] *= 1e17
    example = replace(sound, prediction=prediction, truth=sound.truth if with_truth else None)
    marked = replace(example, diverged_at=3)
    assert figures._limits(marked, 0) == (0.0, 1.1 if with_truth else 1.0)
    assert figures._error_limit(marked, 0) == 1.0  # no error at all before
    assert figures._title(marked, 0).endswith("\ndiverged from t = 0.4 on")
    assert [figures._has_diverged(marked, step) for step in range(5)] == [False, False, False, True, True]
    (tmp_path / "p.png").write_bytes(figures.fields_png(marked, 0))
    (tmp_path / "f.mp4").write_bytes(figures.film(marked, 0))
    heads = imageio.imread(tmp_path / "f.mp4")[:, :60].astype(int)  # the title of each frame
    red = (heads[..., 0] - heads[..., 1] > 60).any(axis=(1, 2))
    assert red.tolist() == [False] * 3 + [True] * (len(red) - 3)


def test_a_title_says_of_which_split_a_trajectory_is():
    from dataclasses import replace

    from ups.evaluation.figures import _title

    reader = MemoryReader()
    (example,) = examples(almost, reader, RolloutPlan.whole(reader, 1), [1])
    assert "test trajectory 1" in _title(example, 0)
    assert ", trajectory 1" in _title(replace(example, split=""), 0)
    assert "trajectory" not in _title(replace(example, trajectory=-1), 0)


@pytest.mark.parametrize(("frames", "rate"), [(2, 2), (9, 2), (12, 3), (40, 8), (80, 8), (81, 9), (120, 12), (999, 24)])
def test_a_film_is_neither_too_short_nor_too_long(frames, rate):
    from ups.evaluation.figures import film_rate

    assert film_rate(frames) == rate


@pytest.mark.parametrize("height", [0.25, 3.0])
def test_a_figure_is_as_large_as_its_maps(height):
    from ups.evaluation import figures

    figure, grid = figures.pyplot().subplots(1, 3, figsize=(11, 6), layout="constrained", squeeze=False)
    for axes in grid[0]:
        axes.imshow(np.zeros((4, 4)), extent=(0, 1, 0, height))
    figures._fit(figure, grid)
    figure.canvas.draw()
    size, box = figure.get_size_inches(), grid[0][0].get_position(original=True)
    figures.pyplot().close(figure)
    assert size[1] < 3 if height < 1 else size[0] < 8.5
    assert box.width * size[0] > 1.7
    assert box.height * size[1] > 0.85


def test_drawing_ends_when_its_time_is_over_and_the_page_says_so(monkeypatch):
    from ups.evaluation import report as module

    drawn = []
    monkeypatch.setattr(module, "fields_png", lambda example, channel: drawn.append(example.trajectory) or b"")
    monkeypatch.setattr(module, "film", lambda example, channel, seconds, gif: drawn.append(seconds))
    pictures = [replace(saturated(1.0), trajectory=number) for number in range(5)]
    shown = module._examples(pictures, time.monotonic() - 1)
    assert drawn[0] == 0
    assert drawn[1] < 0, "no time is left for a film"
    assert len(drawn) == 2
    assert (shown["wanted"], len(shown["drawn"])) == (5, 1)
    shown = module._examples(pictures, time.monotonic() + 600)
    assert len(drawn) == 8
    assert (shown["wanted"], len(shown["drawn"])) == (5, 5)


def test_a_film_with_less_time_has_fewer_frames_over_the_same_span(tmp_path, monkeypatch):
    from ups.evaluation import figures

    encoded = []
    monkeypatch.setattr(figures, "_drawn", lambda figure, show, steps, size: encoded.append(list(steps)))
    monkeypatch.setattr(figures, "_write_gif", lambda frames, rate: b"")
    example = saturated(1.0)
    long = replace(example, prediction=np.repeat(example.prediction, 40, 0), truth=np.repeat(example.truth, 40, 0))
    clock = iter(range(1000))
    monkeypatch.setattr(figures.time, "monotonic", lambda: next(clock))  # a second for each call
    last = len(long.prediction) - 1
    for seconds, frames in ((math.inf, min(last + 1, figures.MAX_FILM_FRAMES)), (1 + 3 * 20, 20)):
        figures.film(long, 0, seconds, gif=True)
        assert (len(encoded[-1]), encoded[-1][0], encoded[-1][-1]) == (frames, 0, last)
    assert figures.film(long, 0, 1 + 3 * 5, gif=True) is None
    assert len(encoded) == 2
