"""Draws the picture of the multiscale network in docs/model.md: `python docs/pictures/draw_model.py` (extra `report`).

Channels, blocks and kernels are those of the default settings. Writes multiscale-network.png next to this file.
"""

from __future__ import annotations

from typing import Any

from draw_architecture import HERE, INK, PLAIN, arrow, box, canvas

from ups.config.model import MultiscaleConfig

SHARED, OWN = "#fde7c8", "#dbeafe"
BLUE = "#1d4ed8"
POINTS = {0: "every point", 1: "half the points\nalong each axis", 2: "a quarter"}


def note(axes: Any, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, **{"fontsize": 7.5, "color": INK, "ha": "center", "va": "center"} | style)


def plus(axes: Any, x: float, y: float) -> None:
    """A sum of two streams."""
    axes.plot([x], [y], "o", markersize=13, markerfacecolor="white", markeredgecolor=INK, markeredgewidth=0.9)
    note(axes, x, y - 0.005, "+", fontsize=11)


def draw() -> None:
    config = MultiscaleConfig()
    figure, axes = canvas(11.4, 6.15)
    heights = [3.55, 2.5, 1.45]
    down, up = [2.35, 3.4], [7.35, 6.3]
    wide, high = 1.15, 0.62

    words = "row of the task, boundary of each axis, parameters, dt, size of the fields: scale and shift of every block"
    box(axes, 0.2, 4.85, 9.25, 0.62, "condition", words, SHARED)

    box(axes, 0.2, heights[0], 1.35, high, "frames", "÷ amplitude of the last;\nstatic fields", PLAIN)
    box(axes, 1.72, heights[0], 0.5, high, "lift", "", OWN)
    box(axes, 8.63, heights[0], 0.82, high, "lower", "× amplitude", OWN)
    arrow(axes, (1.55, heights[0] + high / 2), (1.72, heights[0] + high / 2))

    for level, (left, right) in enumerate(zip(down, up, strict=True)):
        y = heights[level]
        kernel = config.kernel_size if level == 0 else 3
        words = f"{config.widths[level]} channels\nkernel {kernel}"
        for x in (left, right):
            box(axes, x, y, wide, high, "block" if config.blocks[level] == 1 else "blocks", words, SHARED)
        arrow(axes, (left + wide, y + high / 2), (right - 0.32, y + high / 2), BLUE)
        plus(axes, right - 0.2, y + high / 2)
        note(axes, (left + wide + right - 0.3) / 2, y + high / 2 + 0.12, "skip", color=BLUE)
        arrow(axes, (right - 0.1, y + high / 2), (right, y + high / 2))
    arrow(axes, (2.22, heights[0] + high / 2), (2.35, heights[0] + high / 2))
    arrow(axes, (up[0] + wide, heights[0] + high / 2), (8.63, heights[0] + high / 2))

    middle = 4.33
    words = f"{config.blocks[2]} with {config.widths[2]} channels, kernel 3\n"
    words += f"then {config.num_heads} heads, rotary positions"
    box(axes, middle, heights[2], 1.75, high, "blocks, attention", words, SHARED)
    for level in range(2):
        below = heights[level + 1]
        x = down[level] + 0.62
        to = (down[1] + 0.2, below + high) if level == 0 else (middle + 0.3, below + high)
        arrow(axes, (x, heights[level]), to)
        note(axes, x - 0.12, heights[level] - 0.2, "shrink", ha="right")
        back = (up[1] + 0.95, below + high) if level == 0 else (middle + 1.45, below + high)
        arrow(axes, back, (up[level] - 0.2, heights[level] + high / 2 - 0.12))
        note(axes, up[level] + 0.1, heights[level] - 0.2, "grow", ha="left")
    for level, y in enumerate(heights):
        note(axes, 0.25, y + (-0.22 if level == 0 else high / 2), POINTS[level], ha="left", color="#5b6770")

    box(axes, 0.2, 0.3, 1.35, high, "last frame", "", PLAIN)
    words = "Fourier modes (cosines where an axis is not periodic) × learned multipliers, linear in the parameters"
    box(axes, 2.35, 0.3, 6.15, high, "propagator: what is linear in the equation", words, OWN)
    arrow(axes, (1.55, 0.3 + high / 2), (2.35, 0.3 + high / 2))

    total = 9.74
    plus(axes, total, heights[0] + high / 2)
    arrow(axes, (9.45, heights[0] + high / 2), (total - 0.11, heights[0] + high / 2))
    arrow(axes, (8.5, 0.3 + high / 2), (total, heights[0] + high / 2 - 0.13), bend=0.25)
    words = "× usual change;\nmean taken out\nwhere conserved"
    box(axes, 10.03, heights[0] - 0.1, 1.2, high + 0.2, "change", words, PLAIN)
    arrow(axes, (total + 0.11, heights[0] + high / 2), (10.03, heights[0] + high / 2))
    box(axes, 10.03, 2.2, 1.2, high, "next frame", "last frame + change", PLAIN)
    arrow(axes, (10.62, heights[0] - 0.1), (10.62, 2.2 + high))

    for x in (down[0] + wide / 2, up[0] + wide / 2):
        arrow(axes, (x, 4.85), (x, heights[0] + high), "#8a94a0")
    for x, y in ((down[1] + wide / 2, heights[1]), (middle + 0.87, heights[2]), (up[1] + wide / 2, heights[1])):
        axes.plot([x, x], [4.85, y + high + 0.1], color="#8a94a0", linewidth=0.9, linestyle=":", zorder=0)
        arrow(axes, (x, y + high + 0.14), (x, y + high), "#8a94a0")

    note(axes, 0.2, 5.8, "One network for every task", fontsize=12, weight="bold", ha="left", color=BLUE)
    for x, color, words in (
        (3.3, SHARED, "weights shared between tasks (with own_kernels: kernels by number of dimensions)"),
        (8.75, OWN, "tables with rows for each task"),
    ):
        box(axes, x, 5.71, 0.26, 0.19, "", "", color)
        note(axes, x + 0.34, 5.8, words, ha="left", fontsize=8)
    figure.savefig(HERE / "multiscale-network.png", dpi=110)


if __name__ == "__main__":
    draw()
