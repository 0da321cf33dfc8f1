"""Two gradients of the same global batch: equal to rounding, or in what way not. No processes, no files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ups.doctor.probes.check import CheckFailed

# float64 leaves about 1e-12 after thousands of sums; a wrong denominator leaves 0.5 or more.
TOLERANCE = 1e-7
_MEANS = "training on many ranks would not be training on one with the same batch: results change with the world size"


def check_equal(
    found: Mapping[str, Tensor], reference: Mapping[str, Tensor], what: str, counts: Mapping[str, int]
) -> float:
    """Relative distance of two gradients. Raises CheckFailed if they differ, and says how.

    counts: numbers that a wrong scale may be made of, by name ('ranks': 2, 'micro-batches': 4).
    """
    missing = sorted(reference.keys() ^ found.keys())
    if missing:
        raise CheckFailed(f"{what}: only one side has a gradient of {', '.join(missing[:6])}", means=_MEANS)
    names = sorted(reference)
    mine = torch.cat([found[n].flatten() for n in names])
    truth = torch.cat([reference[n].flatten() for n in names])
    size = float(truth.norm())
    distance = float((mine - truth).norm()) / max(size, 1e-300)
    if distance <= TOLERANCE:
        return distance
    scale = float(mine @ truth) / max(size * size, 1e-300)
    if float((mine - scale * truth).norm()) <= 1e-6 * float(mine.norm()):
        raise CheckFailed(
            f"{what} is {scale:.6g} times what it must be{_guess(scale, counts)}",
            means="accumulated or averaged with a wrong denominator: the learning rate is not what the recipe says",
            hint="the loss of a micro-batch counts with (its samples / samples of the global batch) x ranks, and "
            "gradients are averaged over ranks once, in the last micro-batch",
        )
    worst = sorted(names, key=lambda n: float((found[n] - reference[n]).norm()), reverse=True)[:4]
    raise CheckFailed(
        f"{what} differs from what it must be by {100 * distance:.3g} % (most in {', '.join(worst)})",
        means=_MEANS,
        hint="look for what depends on the rank or on the other samples of a batch: draws, masks, batch statistics, "
        "a micro-batch whose gradient is not reduced",
    )


def _guess(scale: float, counts: Mapping[str, int]) -> str:
    """The counts that `scale` or its inverse equals: several may, in a small world."""
    many = [name for name, count in counts.items() if count > 1 and abs(scale - count) < 1e-6 * count]
    few = [name for name, count in counts.items() if count > 1 and abs(scale * count - 1) < 1e-6]
    if not many and not few:
        return ""
    return f" ({'1 / ' if few else ''}the number of {', or of '.join(many or few)})"
