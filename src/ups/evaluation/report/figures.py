"""Pictures of results as text for a page: curves as SVG, fields as PNG, films as MP4.

Colours: Okabe and Ito's palette for lines (told apart by colour-blind people, and by line style too), viridis for
fields, PuOr for signed errors. Truth and prediction always share one colour scale.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.errors import MissingExtraError
from ups.evaluation.gallery import Example

LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", "-.", ":", "-", "--", "-.")
FIELD_MAP, ERROR_MAP = "viridis", "PuOr"
MAX_FILM_FRAMES = 120


def pyplot() -> Any:
    """matplotlib.pyplot without a screen; a clear error where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError.of("report", "matplotlib", "drawing a report") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"})
    return plt


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight")
    pyplot().close(figure)
    body = text.getvalue()
    return body[body.index("<svg") :]


def _png(figure: Any) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110, bbox_inches="tight")
    pyplot().close(figure)
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def curve_figure(
    curves: Mapping[str, Sequence[float]], title: str, y_label: str, x_label: str, *, x: Sequence[float] | None = None
) -> str:
    """Lines on a logarithmic scale, one per predictor, as SVG. Steps that blew up are missing from a line."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(5.6, 3.4))
    for number, (name, values) in enumerate(curves.items()):
        line = np.asarray(values, np.float64)
        at = np.arange(1, len(line) + 1) if x is None else np.asarray(x, np.float64)
        line = np.where(np.isfinite(line) & (line > 0), line, np.nan)
        axes.plot(
            at,
            line,
            LINE_STYLES[number % 7],
            color=LINE_COLOURS[number % 7],
            label=name,
            linewidth=2 if number == 0 else 1.5,
            marker="o" if len(line) == 1 else "",
        )
    axes.set(yscale="log", xlabel=x_label, ylabel=y_label, title=title)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


def _limits(example: Example, channel: int) -> tuple[float, float]:
    truth = example.truth[:, channel]
    low, high = float(truth.min()), float(truth.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _error_limit(example: Example, channel: int) -> float:
    error = np.abs(example.prediction[:, channel] - example.truth[:, channel])
    finite = error[np.isfinite(error)]
    return float(finite.max()) if finite.size and finite.max() > 0 else 1.0


def fields_figure(example: Example, channel: int, num_times: int = 4) -> str:
    """Truth, prediction, error: space-time maps in 1D, maps at chosen times in 2D (middle slice in 3D), as PNG."""
    if example.truth.ndim == 3:
        return _space_time_figure(example, channel)
    plt = pyplot()
    steps = np.unique(np.linspace(0, len(example.truth) - 1, num_times).astype(int))
    figure, grid = plt.subplots(
        3, len(steps), figsize=(2.3 * len(steps) + 1.4, 6.4), squeeze=False, layout="constrained"
    )
    low, high = _limits(example, channel)
    bound = _error_limit(example, channel)
    for column, step in enumerate(steps):
        truth, prediction = (_slice(f[step, channel]) for f in (example.truth, example.prediction))
        for row, (name, values) in enumerate(_rows(truth, prediction)):
            axes = grid[row][column]
            limits = {"vmin": -bound, "vmax": bound} if row == 2 else {"vmin": low, "vmax": high}
            image = axes.imshow(
                values.T, origin="lower", cmap=ERROR_MAP if row == 2 else FIELD_MAP, extent=_extent(example), **limits
            )
            if row == 0 and not example.task.steady:
                axes.set_title(f"t = {example.time_of(int(step)):.3g}")
            if column == 0:
                axes.set_ylabel(f"{name}\n{example.task.axes[1].name}")
            if row == 2:
                axes.set_xlabel(example.task.axes[0].name)
            if column == len(steps) - 1:
                figure.colorbar(image, ax=list(grid[row]), shrink=0.9)
    figure.suptitle(_title(example, channel))
    return _png(figure)


def _space_time_figure(example: Example, channel: int) -> str:
    plt = pyplot()
    figure, grid = plt.subplots(1, 3, figsize=(10.5, 3.4), layout="constrained", sharey=True)
    low, high = _limits(example, channel)
    bound = _error_limit(example, channel)
    axis = example.coordinates[0]
    extent = (float(axis[0]), float(axis[-1]), example.time_of(0), example.time_of(len(example.truth) - 1))
    for number, (name, values) in enumerate(_rows(example.truth[:, channel], example.prediction[:, channel])):
        limits = {"vmin": -bound, "vmax": bound} if number == 2 else {"vmin": low, "vmax": high}
        image = grid[number].imshow(
            values, origin="lower", aspect="auto", cmap=ERROR_MAP if number == 2 else FIELD_MAP, extent=extent, **limits
        )
        grid[number].set(title=name, xlabel=example.task.axes[0].name)
        figure.colorbar(image, ax=grid[number])
    grid[0].set_ylabel("time")
    figure.suptitle(_title(example, channel))
    return _png(figure)


def _rows(truth: npt.NDArray[Any], prediction: npt.NDArray[Any]) -> list[tuple[str, npt.NDArray[Any]]]:
    return [("truth", truth), ("prediction", prediction), ("error", prediction - truth)]


def _slice(field: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return field[:, :, field.shape[2] // 2] if field.ndim == 3 else field


def _extent(example: Example) -> tuple[float, float, float, float]:
    x, y = example.coordinates[:2]
    return float(x[0]), float(x[-1]), float(y[0]), float(y[-1])


def _title(example: Example, channel: int) -> str:
    unit = example.units[channel]
    name = example.channels[channel] + (f" [{unit}]" if unit != "1" else "")
    return f"{example.task.name}: {name}, trajectory {example.trajectory}"


def film(example: Example, channel: int, frames_per_second: int = 8) -> str | None:
    """Truth, prediction and error moving together, as an MP4 data address; None for a single step or without ffmpeg."""
    if len(example.truth) < 2:
        return None
    try:
        import imageio_ffmpeg
    except ImportError:
        return None
    plt = pyplot()
    steps = np.unique(np.linspace(0, len(example.truth) - 1, MAX_FILM_FRAMES).astype(int))
    one_dimensional = example.truth.ndim == 3
    figure, grid = plt.subplots(
        1, 2 if one_dimensional else 3, figsize=(9, 3.4), layout="constrained", dpi=100, squeeze=False
    )
    draw = _film_lines(example, channel, grid[0]) if one_dimensional else _film_maps(example, channel, figure, grid[0])
    figure.canvas.draw()
    width, height = (n // 2 * 2 for n in figure.canvas.get_width_height())
    data = _encode(imageio_ffmpeg, figure, draw, steps, (width, height), frames_per_second, example, channel)
    plt.close(figure)
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"


def _film_lines(example: Example, channel: int, grid: Any) -> Any:
    x = example.coordinates[0]
    low, high = _limits(example, channel)
    pad = 0.1 * (high - low)
    bound = _error_limit(example, channel)
    (truth,) = grid[0].plot(x, x * np.nan, color="#000000", label="truth")
    (guess,) = grid[0].plot(x, x * np.nan, "--", color=LINE_COLOURS[1], label="prediction")
    (error,) = grid[1].plot(x, x * np.nan, color=LINE_COLOURS[0])
    grid[0].set(ylim=(low - pad, high + pad), xlabel=example.task.axes[0].name, title=example.channels[channel])
    grid[1].set(ylim=(-bound, bound), xlabel=example.task.axes[0].name, title="error")
    grid[0].legend(frameon=False, loc="upper right", fontsize=9)

    def draw(step: int) -> None:
        truth.set_ydata(example.truth[step, channel])
        guess.set_ydata(example.prediction[step, channel])
        error.set_ydata(example.prediction[step, channel] - example.truth[step, channel])

    return draw


def _film_maps(example: Example, channel: int, figure: Any, grid: Any) -> Any:
    low, high = _limits(example, channel)
    bound = _error_limit(example, channel)
    images = []
    for number, (name, values) in enumerate(
        _rows(_slice(example.truth[0, channel]), _slice(example.prediction[0, channel]))
    ):
        limits = {"vmin": -bound, "vmax": bound} if number == 2 else {"vmin": low, "vmax": high}
        image = grid[number].imshow(
            values.T,
            origin="lower",
            cmap=ERROR_MAP if number == 2 else FIELD_MAP,
            extent=_extent(example),
            animated=True,
            **limits,
        )
        grid[number].set(title=name, xlabel=example.task.axes[0].name, ylabel=example.task.axes[1].name)
        figure.colorbar(image, ax=grid[number], shrink=0.8)
        images.append(image)

    def draw(step: int) -> None:
        pair = (_slice(example.truth[step, channel]), _slice(example.prediction[step, channel]))
        for image, (_, values) in zip(images, _rows(*pair), strict=True):
            image.set_data(values.T)

    return draw


def _encode(
    ffmpeg: Any,
    figure: Any,
    draw: Any,
    steps: npt.NDArray[Any],
    size: tuple[int, int],
    frames_per_second: int,
    example: Example,
    channel: int,
) -> bytes:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        # yuv420p and H.264: the one combination that every browser plays
        writer = ffmpeg.write_frames(
            str(path),
            size,
            fps=frames_per_second,
            codec="libx264",
            pix_fmt_out="yuv420p",
            macro_block_size=2,
            quality=6,
        )
        writer.send(None)
        for step in steps:
            draw(int(step))
            figure.suptitle(f"{_title(example, channel)}, t = {example.time_of(int(step)):.3g}")
            figure.canvas.draw()
            pixels = np.asarray(figure.canvas.buffer_rgba())[: size[1], : size[0], :3]
            writer.send(np.ascontiguousarray(pixels))
        writer.close()
        return path.read_bytes()
