"""Fields of a few trajectories, as pictures (PNG) and films (MP4, GIF); the charts of scores are in `report`.

Where the truth is known it is next to the prediction, with their difference; else only the prediction is drawn. Colors:
Okabe and Ito's palette for lines (can be distinguished by color-blind people, and by line style too), viridis for
fields, PuOr for signed errors. Truth and prediction always share one color scale, that of the truth: where the
prediction leaves it the color is one that is not on the scale and is explained below the panels, the bar has a tip, and
the title gives its range. Frames of a prediction that has diverged are marked, and no scale is that of theirs.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
import itertools
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ups.errors import MissingExtraError
from ups.evaluation.rollout import RolloutPlan, batches_of, read_inputs
from ups.formats.base import Reader
from ups.models.stepper import Predictor, rollout
from ups.spec.batch import Float64
from ups.spec.descriptors import DivergenceLimits
from ups.spec.grid import is_uniform
from ups.spec.task import TaskSpec

LINE_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", "-.", ":", "-", "--", "-.")
FILM_STYLES = {"truth": ("-", "#000000"), "prediction": ("--", "#D55E00"), "error": ("-", "#0072B2")}
FIELD_MAP, ERROR_MAP, GIVEN_MAP = "viridis", "PuOr", "cividis"
# Neither is on the scale of fields: above it, below it, and no number at all.
ABOVE, BELOW, NO_NUMBER = "#D81B60", "#80DEEA", "#9E9E9E"
# Hatches what has diverged.
DIVERGED = "#000000"
# A prediction that leaves the range of the truth by less than this part of it only widens the scale.
WIDENED = 0.1
MAX_FILM_FRAMES, LEAST_FILM_FRAMES = 120, 12
FILM_DPI = 120
# A film is neither over at once nor tedious, and no frame stays for longer than half a second.
FILM_SECONDS = (4, 10)
FRAMES_PER_SECOND, LEAST_RATE, GREATEST_RATE = 8, 2, 24
# Room of a panel whose domain is very high or very long: width for numbers and titles, height for labels.
LEAST_PANEL_INCHES = (1.8, 0.9)


@dataclass(frozen=True)
class Example:
    """One trajectory. prediction, and truth where it is known: (T, C, *S), the predicted steps only.

    parameters: name -> value, for the title. given: name -> values (*S) of what a steady task is solved for, with their
    units. split: where the trajectory is from, "" where that is not known. diverged_at: number of the first frame that
    has diverged, from 0; None if none has.
    mesh: points (N, 2) and triangles (M, 3) of fields on points, which are (T, C, N, 1) and (N, 1), coordinates ().
    """

    task: TaskSpec
    trajectory: int
    first_step_time: float
    step_time: float
    channels: tuple[str, ...]
    units: tuple[str, ...]
    coordinates: tuple[npt.NDArray[np.float64], ...]
    prediction: npt.NDArray[np.float64]
    truth: npt.NDArray[np.float64] | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    given: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    given_units: tuple[str, ...] = ()
    split: str = ""
    diverged_at: int | None = None
    mesh: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]] | None = None

    @property
    def source(self) -> str:
        """Which trajectory it is, for a title; "" where it is none of a data set."""
        return f"{self.split} trajectory {self.trajectory}".strip() if self.trajectory >= 0 else ""

    def time_of(self, step: int) -> float:
        return self.first_step_time + step * self.step_time


@torch.no_grad()
def examples(
    predictor: Predictor,
    reader: Reader,
    plan: RolloutPlan,
    trajectories: Sequence[int],
    split: str = "test",
    limits: DivergenceLimits | None = None,
) -> list[Example]:
    """Truth and prediction of chosen trajectories, in the order asked for. limits: of what has not diverged."""
    task = reader.task
    units, given_units = (
        tuple(f.unit for f in task.fields_of(role) for _ in range(f.num_channels(task.num_spatial_dims)))
        for role in (task.predicted, "static")
    )
    names = task.channel_names("static") if task.steady else ()
    by_number: dict[int, Example] = {}
    for part, span in batches_of(reader, split, trajectories, plan, max(1, len(trajectories))):
        batch, truth = read_inputs(reader, split, part, span, torch.device("cpu"), torch.float32)
        frames = torch.stack(list(rollout(predictor, batch, span.num_steps)), dim=1)
        shown = 0.0 if batch.valid is None else torch.where(batch.valid > 0, 0.0, torch.nan)[:, None]
        drawn, true = frames + shown, truth + shown
        for i, trajectory in enumerate(part):
            dt = reader.dt_in(split, trajectory)
            bad = [] if limits is None else limits.exceeded(frames[i]).nonzero().flatten().tolist()
            by_number[trajectory] = Example(
                task=task,
                trajectory=trajectory,
                first_step_time=(plan.start_frame + 1) * dt,
                step_time=dt,
                channels=task.channel_names(task.predicted),
                units=units,
                coordinates=reader.coordinates,
                prediction=drawn[i].double().numpy(),
                truth=true[i].double().numpy(),
                parameters={p.name: float(v) for p, v in zip(task.parameters, batch.parameters[i], strict=True)},
                given={name: batch.static[i, n].double().numpy() for n, name in enumerate(names)},
                given_units=given_units,
                split=split,
                diverged_at=bad[0] if bad else None,
            )
    return [even(by_number[trajectory]) for trajectory in trajectories if trajectory in by_number]


def even(example: Example) -> Example:
    """The example on equally spaced points, as pictures show them: interpolated where the grid is not uniform."""
    prediction, truth, fields = example.prediction, example.truth, dict(example.given)
    coordinates = list(example.coordinates)
    for number, points in enumerate(coordinates):
        if is_uniform(points):
            continue
        coordinates[number] = np.linspace(points[0], points[-1], len(points))
        dim = number - len(coordinates)
        prediction = _interpolated(prediction, dim, points, coordinates[number])
        truth = None if truth is None else _interpolated(truth, dim, points, coordinates[number])
        fields = {name: _interpolated(values, dim, points, coordinates[number]) for name, values in fields.items()}
    return replace(example, prediction=prediction, truth=truth, given=fields, coordinates=tuple(coordinates))


def _interpolated(values: Float64, dim: int, points: Float64, wanted: Float64) -> Float64:
    """Linear between neighboring points along one axis."""
    last = np.clip(np.searchsorted(points, wanted, side="right"), 1, len(points) - 1)
    part = (wanted - points[last - 1]) / (points[last] - points[last - 1])
    shape = [1] * values.ndim
    shape[dim] = -1
    left, right = np.take(values, last - 1, axis=dim), np.take(values, last, axis=dim)
    return np.asarray(left + part.reshape(shape) * (right - left))


def ffmpeg() -> Any:
    """The package that encodes MP4. Raises MissingExtraError without it; GIF needs nothing."""
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise MissingExtraError.of("report", "imageio[ffmpeg]", "a film as .mp4 (.gif needs no package)") from error
    return imageio_ffmpeg


def film_suffix() -> str:
    """'.mp4' where it can be encoded, else '.gif'."""
    return ".gif" if importlib.util.find_spec("imageio_ffmpeg") is None else ".mp4"


def pyplot() -> Any:
    """matplotlib.pyplot without a screen."""
    import matplotlib

    matplotlib.rcdefaults()  # not what a `matplotlibrc` in the current directory says, such as to run LaTeX
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"})
    return plt


def svg_text(figure: Any) -> str:
    """The figure as text that a page holds directly; closes the figure."""
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight")
    pyplot().close(figure)
    body = text.getvalue()
    return body[body.index("<svg") :]


def png_bytes(figure: Any) -> bytes:
    """The figure as PNG; closes the figure."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110, bbox_inches="tight")
    pyplot().close(figure)
    return data.getvalue()


def data_address(kind: str, data: bytes) -> str:
    """Bytes as an address that a page can show by itself."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _limits(example: Example, channel: int) -> tuple[float, float]:
    """The one color scale of truth and prediction: the range of the truth where it is known, and a little more."""
    least, greatest = _range(example.prediction[:, channel])
    if example.truth is None:
        low, high = _range(example.prediction[: example.diverged_at or None, channel])
    else:
        low, high = _range(example.truth[:, channel])
        room = WIDENED * (high - low)
        low, high = max(low - room, min(low, least)), min(high + room, max(high, greatest))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _range(values: npt.NDArray[Any]) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _error_limit(example: Example, channel: int) -> float:
    if example.truth is None:
        return 1.0
    before = slice(None, example.diverged_at or None)
    error = np.abs(example.prediction[before, channel] - example.truth[before, channel])
    finite = error[np.isfinite(error)]
    return float(finite.max()) if finite.size and finite.max() > 0 else 1.0


def _rows(example: Example, channel: int, step: int | None = None) -> list[tuple[str, npt.NDArray[Any]]]:
    """(name, values) of what is drawn: truth, prediction, error, or the prediction alone; all steps or one."""
    at = slice(None) if step is None else step
    prediction = example.prediction[at, channel]
    if example.truth is None:
        return [("prediction", prediction)]
    truth = example.truth[at, channel]
    return [("truth", truth), ("prediction", prediction), ("error", prediction - truth)]


def _scale(example: Example, channel: int, name: str) -> dict[str, Any]:
    if name == "error":
        bound = _error_limit(example, channel)
        return {"cmap": ERROR_MAP, "vmin": -bound, "vmax": bound}
    low, high = _limits(example, channel)
    colors = pyplot().get_cmap(FIELD_MAP).with_extremes(over=ABOVE, under=BELOW, bad=NO_NUMBER)
    return {"cmap": colors, "vmin": low, "vmax": high}


def _beyond(example: Example, channel: int) -> tuple[bool, bool]:
    """Whether the prediction leaves the color scale, below and above."""
    (low, high), (least, greatest) = _limits(example, channel), _range(example.prediction[:, channel])
    return least < low, greatest > high


def _tips(example: Example, channel: int, name: str) -> str:
    """Which ends of a color bar are open."""
    below, above = _beyond(example, channel) if name != "error" else (False, False)
    return "both" if below and above else "min" if below else "max" if above else "neither"


def _panel(example: Example, channel: int, name: str) -> str:
    """The title of a panel, with the range of a prediction that leaves the scale."""
    if "prediction" not in name or not any(_beyond(example, channel)):
        return name
    least, greatest = _range(example.prediction[:, channel])
    return f"{name}\n{least:.3g} to {greatest:.3g}"


def _explain_colors(figure: Any, example: Example, channel: int, shown: npt.NDArray[Any]) -> None:
    """A legend of the colors that are not on the scale, of those that what is shown of the prediction has."""
    from matplotlib.patches import Patch

    low, high = _limits(example, channel)
    finite = np.isfinite(shown)
    scale = "scale of the truth" if example.truth is not None else "scale of the frames before divergence"
    colors = {
        f"below the {scale}": (BELOW, bool((shown[finite] < low).any())),
        f"above the {scale}": (ABOVE, bool((shown[finite] > high).any())),
        f"no value: {example.task.mask}" if example.task.mask else "not a finite number": (NO_NUMBER, not finite.all()),
    }
    patches = [Patch(facecolor=color, label=text) for text, (color, drawn) in colors.items() if drawn]
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
        figure.set_figheight(figure.get_figheight() + 0.3)


def _fit(figure: Any, panels: Any) -> None:
    """Take from the figure what its panels do not fill: maps have the proportions of their domain, figures do not."""
    first = panels[0][0]
    across = abs(np.diff(first.get_xlim())[0] / np.diff(first.get_ylim())[0])  # width of a map by its height
    side = None
    for _ in range(3):  # what surrounds the panels changes a little with the size
        figure.get_layout_engine().execute(figure)
        size, box = figure.get_size_inches(), first.get_position(original=True)
        width, height = size * (box.width, box.height)
        if side is None:
            side = 0 if width > height * across else 1
        wanted = max((height * across, width / across)[side], LEAST_PANEL_INCHES[side])
        spare = (width, height)[side] - wanted
        size[side] -= spare * (len(panels[0]), len(panels))[side]
        figure.set_size_inches(size)
        if abs(spare) < 0.02:
            return


def _fit_title(figure: Any, text: str) -> Any:
    """The title over all panels, in smaller letters where the figure is too narrow for it."""
    title = figure.suptitle(text)
    width, room = title.get_window_extent(figure.canvas.get_renderer()).width, 0.96 * figure.bbox.width
    if width > room:
        title.set_fontsize(title.get_fontsize() * room / width)
    return title


def fields_png(example: Example, channel: int, num_times: int = 4) -> bytes:
    """Space-time maps in 1D, maps at chosen times in 2D (middle slice in 3D), as PNG."""
    if example.prediction.ndim == 3:
        return _space_time_png(example, channel)
    plt = pyplot()
    steps = [int(n) for n in np.unique(np.linspace(0, len(example.prediction) - 1, num_times).astype(int))]
    if len(steps) == 1:
        return _one_time_png(example, channel)
    count = len(_rows(example, channel))
    size = (2.3 * len(steps) + 1.4, 2.1 * count + 0.6)
    figure, grid = plt.subplots(count, len(steps), figsize=size, squeeze=False, layout="constrained")
    for column, step in enumerate(steps):
        for row, (name, values) in enumerate(_rows(example, channel, step)):
            image = _map(grid[row][column], example, channel, name, values)
            time_text = _time(example, step) + ("\ndiverged" if _has_diverged(example, step) else "")
            name_text = f"{_panel(example, channel, name)}\n{_axis(example, 1)}"
            grid[row][column].set(title="" if row else time_text, ylabel="" if column else name_text)
            if row < count - 1:
                grid[row][column].set_xlabel("")
            if column == len(steps) - 1:
                label = _label(example, channel, name).replace(" − ", "\n− ")  # no longer than a row is high
                tips = _tips(example, channel, name)
                figure.colorbar(image, ax=list(grid[row]), shrink=0.9, label=label, extend=tips)
    return _finished_maps(figure, grid, example, channel, steps)


def _map(axes: Any, example: Example, channel: int, name: str, values: npt.NDArray[Any]) -> Any:
    """Draw a plane of values, of a cube the middle one."""
    scale = _scale(example, channel, name)
    axes.set(title=_panel(example, channel, name), xlabel=_axis(example, 0), ylabel=_axis(example, 1))
    return _plane(axes, example, values, **scale)


def _plane(axes: Any, example: Example, values: npt.NDArray[Any], **scale: Any) -> Any:
    """A map of values on a grid, of a cube its middle plane, or at the points of triangles."""
    if example.mesh is None:
        return axes.imshow(_slice(values).T, origin="lower", extent=_extent(example), **scale)
    points, triangles = example.mesh
    axes.set_aspect("equal")
    return axes.tripcolor(*points.T, triangles, values[:, 0], shading="gouraud", **scale)


def _finished_maps(figure: Any, grid: Any, example: Example, channel: int, steps: Sequence[int]) -> bytes:
    _explain_colors(figure, example, channel, np.stack([_slice(example.prediction[n, channel]) for n in steps]))
    figure.suptitle(_title(example, channel))
    _fit(figure, grid)
    return png_bytes(figure)


def _one_time_png(example: Example, channel: int) -> bytes:
    """A single time as one row; what a steady task was solved for stands in front."""
    rows = _rows(example, channel)
    count = len(example.given) + len(rows)
    figure, grid = pyplot().subplots(1, count, figsize=(3.2 * count, 6.0), squeeze=False, layout="constrained")
    panels = list(grid[0])
    for axes, (name, values), unit in zip(panels, example.given.items(), example.given_units, strict=False):
        image = _plane(axes, example, values, cmap=GIVEN_MAP)
        axes.set(title=f"given {name}")
        _bar(figure, image, axes, name + _unit(unit))
        axes.set(xlabel=_axis(example, 0), ylabel=_axis(example, 1))
    for axes, (name, values) in zip(panels[len(example.given) :], rows, strict=True):
        image = _map(axes, example, channel, name, values[0])
        _bar(figure, image, axes, _label(example, channel, name), extend=_tips(example, channel, name))
    return _finished_maps(figure, grid, example, channel, [0])


def _space_time_png(example: Example, channel: int) -> bytes:
    rows = _rows(example, channel)
    figure, grid = pyplot().subplots(
        1, len(rows), figsize=(3.4 * len(rows) + 0.6, 4.0), layout="constrained", sharey=True, squeeze=False
    )
    last = len(example.prediction) - 1
    extent = (*_edges(example.coordinates[0]), *_edges(np.array([example.time_of(0), example.time_of(last)]), last + 1))
    for axes, (name, values) in zip(grid[0], rows, strict=True):
        image = axes.imshow(values, origin="lower", aspect="auto", extent=extent, **_scale(example, channel, name))
        axes.set(title=_panel(example, channel, name), xlabel=_axis(example, 0))
        _add_bar(figure, image, grid[0], example, channel, name)
        if name != "truth" and example.diverged_at is not None:
            first = extent[2] + (extent[3] - extent[2]) * example.diverged_at / (last + 1)
            axes.axhspan(first, extent[3], facecolor="none", edgecolor=DIVERGED, hatch="//", linewidth=1.5)
    grid[0][0].set_ylabel("time" + _unit(example.task.time_unit))
    _explain_colors(figure, example, channel, example.prediction[:, channel])
    figure.suptitle(_title(example, channel))
    return png_bytes(figure)


def _add_bar(figure: Any, image: Any, panels: Any, example: Example, channel: int, name: str) -> None:
    """A color bar below panels in a row: truth and prediction share a scale, and so one bar."""
    if name != "truth":
        below = panels[2] if name == "error" else list(panels[:2])
        _bar(figure, image, below, _label(example, channel, name), extend=_tips(example, channel, name))


def _bar(figure: Any, image: Any, panels: Any, label: str, **options: Any) -> None:
    """A color bar below panels: at their side its label would look like that of the next panel."""
    two = isinstance(panels, list) and len(panels) > 1
    size = {"shrink": 0.6, "aspect": 30} if two else {"shrink": 0.9, "aspect": 20}
    bar = figure.colorbar(image, ax=panels, location="bottom", label=label, **size, **options)
    bar.ax.locator_params(nbins=4)


def _slice(field: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return field[:, :, field.shape[2] // 2] if field.ndim == 3 else field


def _edges(centers: npt.NDArray[np.float64], count: int | None = None) -> tuple[float, float]:
    """The outer borders of the cells around equally spaced points, given all of them or the ends of `count`."""
    first, last = float(centers[0]), float(centers[-1])
    half = (last - first) / max(1, (count or len(centers)) - 1) / 2
    return (first - half, last + half) if half > 0 else (first - 0.5, last + 0.5)


def _extent(example: Example) -> tuple[float, float, float, float]:
    x, y = example.coordinates[:2]
    return (*_edges(x), *_edges(y))


def _unit(unit: str) -> str:
    return f" [{unit}]" if unit != "1" else ""


def _axis(example: Example, number: int) -> str:
    axis = example.task.axes[number]
    return axis.name + _unit(axis.unit)


def _time(example: Example, step: int) -> str:
    return f"t = {example.time_of(step):.3g}{_unit(example.task.time_unit)}"


def _label(example: Example, channel: int, name: str) -> str:
    """What the numbers of a panel are: the field, or the difference of two, with the unit."""
    what = "prediction − truth" if name == "error" else example.channels[channel]
    return what + _unit(example.units[channel])


def _title(example: Example, channel: int) -> str:
    which = f", {example.source}" if example.source else ""
    values = ", ".join(f"{name} = {value:.3g}" for name, value in list(example.parameters.items())[:3])
    where = ""
    if example.prediction.ndim == 5:  # the plane of a cube that is drawn
        z = example.coordinates[2]
        where = f", plane {example.task.axes[2].name} = {float(z[len(z) // 2]):.3g}"
    text = f"{example.task.name}: {example.channels[channel]}{where}{which}" + (f" ({values})" if values else "")
    return text if example.diverged_at is None else f"{text}\ndiverged from {_time(example, example.diverged_at)} on"


def _has_diverged(example: Example, step: int) -> bool:
    return example.diverged_at is not None and step >= example.diverged_at


def film(example: Example, channel: int, seconds: float = math.inf, *, gif: bool = False) -> bytes | None:
    """Truth, prediction and error moving together, as MP4 or GIF; None for a single step.

    seconds: how long to draw; it has fewer frames if they would take longer, and None is returned for less than
    `LEAST_FILM_FRAMES`. Raises MissingExtraError for MP4 without ffmpeg.
    """
    if len(example.prediction) < 2 or seconds <= 0:
        return None
    began = time.monotonic()
    encode, plt = _write_gif if gif else functools.partial(_write_mp4, ffmpeg()), pyplot()
    steps = np.unique(np.linspace(0, len(example.prediction) - 1, MAX_FILM_FRAMES).astype(int))
    one_dimensional = example.prediction.ndim == 3
    panels = len(_rows(example, channel)) if not one_dimensional else 1 if example.truth is None else 2
    # maps: as high as they may get, before what they do not fill is taken away
    size = (3.4 * panels + 1.2 if panels > 1 else 5.6, 3.8 if one_dimensional else 6.0)
    figure, grid = plt.subplots(1, panels, figsize=size, layout="constrained", dpi=FILM_DPI, squeeze=False)
    moving, draw = (_film_lines if one_dimensional else _film_maps)(example, channel, figure, grid[0])
    title = f"{_title(example, channel)}, {_time(example, int(steps[-1]))}"
    figure.suptitle(title)
    if not one_dimensional:
        _explain_colors(figure, example, channel, np.stack([_slice(example.prediction[n, channel]) for n in steps]))
        _fit(figure, grid)
    heading = _fit_title(figure, title)
    figure.canvas.draw()
    figure.set_layout_engine("none")  # laid out once: panels that move between frames would distract
    width, height = (n // 2 * 2 for n in figure.canvas.get_width_height())

    # Text and axes are drawn once: they take most of the time of a frame, and only fields and time change.
    for artist in (*moving, heading):
        artist.set_animated(True)
    figure.canvas.draw()
    still = figure.canvas.copy_from_bbox(figure.bbox)

    def show(step: int) -> None:
        draw(step)
        heading.set_text(f"{_title(example, channel)}, {_time(example, step)}")
        heading.set_color(ABOVE if _has_diverged(example, step) else "black")
        figure.canvas.restore_region(still)
        for artist in (*moving, heading):
            figure.draw_artist(artist)

    drawn = time.monotonic()
    show(int(steps[0]))
    # Encoding a frame takes up to twice as long as drawing it.
    fitting = (seconds - (drawn - began)) / (3 * (time.monotonic() - drawn))
    data = None
    if fitting >= min(LEAST_FILM_FRAMES, len(steps)):
        chosen = np.linspace(0, len(steps) - 1, int(min(fitting, len(steps)))).astype(int)
        data = encode(_drawn(figure, show, steps[chosen], (width, height)), film_rate(len(chosen)))
    plt.close(figure)
    return data


def film_rate(num_frames: int) -> int:
    """Frames per second: the usual number, unless the film would be too short or too long with it."""
    shortest, longest = FILM_SECONDS
    wanted = max(-(-num_frames // longest), min(num_frames // shortest, FRAMES_PER_SECOND))
    return min(GREATEST_RATE, max(LEAST_RATE, wanted))


def _film_lines(example: Example, channel: int, _figure: Any, grid: Any) -> tuple[list[Any], Any]:
    """What changes from frame to frame, in the order of drawing, and the function that changes it."""
    low, high = _limits(example, channel)
    height = high - low
    lines = []
    for name, values in _rows(example, channel, 0):
        axes = grid[1] if name == "error" else grid[0]
        dash, color = FILM_STYLES[name]
        lines += axes.plot(example.coordinates[0], values, dash, color=color, label=name)
        bound = 1.05 * _error_limit(example, channel)
        # space for the legend above the highest curve
        limits = (-bound, bound) if name == "error" else (low - 0.08 * height, high + 0.25 * height)
        axes.set(ylim=limits, xlim=_edges(example.coordinates[0]), xlabel=_axis(example, 0))
        axes.set_ylabel(_label(example, channel, name))
        axes.grid(True, alpha=0.3)
    grid[0].set_title(_panel(example, channel, "truth and prediction" if len(lines) > 1 else "prediction"))
    if len(lines) > 1:
        grid[0].legend(frameon=False, loc="upper center", ncols=2)
        grid[1].set_title("error")

    def draw(step: int) -> None:
        for line, (_, values) in zip(lines, _rows(example, channel, step), strict=True):
            line.set_ydata(values)

    return lines, draw


def _film_maps(example: Example, channel: int, figure: Any, grid: Any) -> tuple[list[Any], Any]:
    """What changes from frame to frame, in the order of drawing, and the function that changes it."""
    images: list[Any] = []
    for axes, (name, values) in zip(grid, _rows(example, channel, 0), strict=True):
        images.append(_map(axes, example, channel, name, values))
        _add_bar(figure, images[-1], grid, example, channel, name)

    def draw(step: int) -> None:
        for image, (_, values) in zip(images, _rows(example, channel, step), strict=True):
            if example.mesh is None:
                image.set_data(_slice(values).T)
            else:
                image.set_array(values[:, 0])

    return images + [spine for axes in grid for spine in axes.spines.values()], draw  # a map covers half of its frame


def _drawn(figure: Any, draw: Any, steps: npt.NDArray[Any], size: tuple[int, int]) -> Iterator[npt.NDArray[np.uint8]]:
    """(height, width, 3): the pixels of each frame."""
    for step in steps:
        draw(int(step))
        yield np.ascontiguousarray(np.asarray(figure.canvas.buffer_rgba())[: size[1], : size[0], :3])


def _write_mp4(ffmpeg: Any, frames: Iterator[npt.NDArray[np.uint8]], rate: int) -> bytes:
    first = next(frames)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        # yuv420p and H.264: the one combination that every browser plays
        writer = ffmpeg.write_frames(
            str(path),
            first.shape[1::-1],
            fps=rate,
            codec="libx264",
            pix_fmt_out="yuv420p",
            macro_block_size=2,
            quality=6,
        )
        writer.send(None)
        for pixels in itertools.chain([first], frames):
            writer.send(pixels)
        writer.close()
        return path.read_bytes()


def _write_gif(frames: Iterator[npt.NDArray[np.uint8]], rate: int) -> bytes:
    from matplotlib.colors import to_rgb
    from PIL import Image

    # One palette for all frames, or colors would flicker. Chosen by hand: the commonest colors are those of the paper.
    colors = [
        *pyplot().get_cmap(FIELD_MAP)(np.linspace(0, 1, 96)),
        *pyplot().get_cmap(ERROR_MAP)(np.linspace(0, 1, 96)),
    ]
    lines = [to_rgb(color) for color in (*(color for _, color in FILM_STYLES.values()), NO_NUMBER, ABOVE, BELOW)]
    colors += [1 - part * (1 - np.array([*color, 1])) for color in lines for part in np.linspace(0, 1, 10)]
    palette = Image.new("P", (1, 1))
    palette.putpalette(np.rint(255 * np.array(colors)[:, :3]).astype(np.uint8).tobytes())
    first, *rest = (Image.fromarray(p).quantize(palette=palette, dither=Image.Dither.NONE) for p in frames)
    data = io.BytesIO()
    first.save(data, format="GIF", save_all=True, append_images=rest, duration=round(1000 / rate), loop=0)
    return data.getvalue()


def draw_panels(panels: Any, example: Example, channel: int) -> float:
    """Truth, prediction and error into three small axes, without ticks; returns the end of the error's scale.

    A line is a map of space and time, a plane (of a cube the middle one) is drawn at the last step.
    """
    line = example.prediction.ndim == 3
    for axes, (name, values) in zip(panels, _rows(example, channel), strict=True):
        shown = values if line else _slice(values[-1]).T
        axes.imshow(shown, origin="lower", aspect="auto" if line else "equal", **_scale(example, channel, name))
        axes.set(xticks=[], yticks=[])
        axes.spines[["top", "right"]].set_visible(True)
        axes.set_title(name, fontsize=9, pad=3)
    panels[0].set_xlabel("x", fontsize=8, labelpad=1)
    panels[0].set_ylabel("time" if line else "y", fontsize=8, labelpad=1)
    return _error_limit(example, channel)
