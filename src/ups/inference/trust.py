"""What a result should not be believed for, for each sample: as bit flags for programs and as lines for people.

Only what was measured counts: parameter ranges, grid, statistics and scored length come from the bundle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ups.inference.bundle import BundleInfo
from ups.inference.domain import points_text
from ups.inference.inputs import Start
from ups.inference.stored_scores import not_better
from ups.spec.descriptors import MAX_PEAK, MAX_RMS, DivergenceLimits, describe, descriptor_names
from ups.spec.statistics import Statistics
from ups.spec.task import Role, TaskSpec

Flags = npt.NDArray[np.bool_]
# The order is the order of the bits of the variable `warnings`; new ones are added at the end.
# `diverged` and `outside` are set at the end of a rollout, the others before it.
KINDS = (
    "parameter_range",
    "grid",
    "domain_rescaled",
    "amplitude",
    "rollout_length",
    "descriptor",
    "not_better",
    "diverged",
    "outside",
)
MAX_NAMED_SAMPLES = 8
# Of the width of a parameter's range: new values from the distribution of the training lie beyond it by less.
BEYOND_RANGE = 0.05
MOST_OTHERS = 3  # descriptors that are named after the worst one


@dataclass(frozen=True)
class Trust:
    """flags (B,): bit k of a sample is set if KINDS[k] applies; warnings and notes: lines for people, none if sound.

    limits: what predicted frames must not exceed; None: they must be finite. outside (B,): samples whose parameters or
    given fields are so far from the training that nothing can be stated about them; None: none.
    """

    flags: npt.NDArray[np.int32]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    limits: DivergenceLimits | None = None
    outside: Flags | None = None

    def attributes(self) -> dict[str, str]:
        """Empty texts where there is nothing to say: they are false in Python, also when read back from a file."""
        return {"warnings": "; ".join(self.warnings), "notes": "; ".join(self.notes)}

    def flag_attributes(self) -> dict[str, Any]:
        """Meaning of the bits, as the CF conventions write it."""
        return {"flag_masks": [1 << bit for bit in range(len(KINDS))], "flag_meanings": " ".join(KINDS)}


def kinds_of(flags: int) -> list[str]:
    """Names of the set bits."""
    return [kind for bit, kind in enumerate(KINDS) if flags & (1 << bit)]


def judge(spec: TaskSpec, start: Start, steps: int, info: BundleInfo) -> Trust:
    """Everything about a rollout of `steps` steps from `start` that the bundle was not trained or scored for."""
    every = np.ones(start.batch.num_samples, np.bool_)
    doubts: list[tuple[str, Flags, str]] = []
    statistics = info.statistics[spec.name]
    about_fields = [*_amplitudes(spec, start, statistics), *_descriptors(spec, start, statistics)]
    outside = np.logical_or.reduce([samples for _, samples, _ in about_fields] + [_beyond(spec, start)])
    for kind, samples, text in [*_parameters(spec, start), *about_fields]:
        doubts.append((kind, samples, _named(samples, batched=start.batched) + text))
    if start.domain.resampling.given != start.batch.space:
        doubts.append(("grid", every, _grid(start)))
    if start.domain.rescaled:
        text = f"the domain was mapped to the trained one ({start.domain.rescaled}); the physics was not rescaled"
        doubts.append(("domain_rescaled", every, text))
    notes = list(start.notes)
    scored = scored_steps(info.scores, spec.name)
    if not spec.steady and scored is not None and steps > scored:
        text = f"{steps} steps are {steps / scored:.3g} times longer than the {scored} that were scored"
        doubts.append(("rollout_length", every, text))
    if text := not_better(info.scores, spec.name):
        doubts.append(("not_better", every, text))
    if spec.name not in info.scores:
        notes.append("this bundle has no scores of this task")
    if not statistics.ranges:
        notes.append("this bundle has no ranges of descriptors: it cannot tell whether a state is unlike its training")
    flags = np.zeros(len(every), np.int32)
    for kind, samples, _ in doubts:
        flags[samples] |= 1 << KINDS.index(kind)
    limits = DivergenceLimits.of(spec, statistics)
    return Trust(flags, tuple(text for _, _, text in doubts), tuple(notes), limits, outside)


def scored_steps(scores: Mapping[str, Any], task: str) -> int | None:
    """Steps of the rollouts that a task was scored on; None if that is not known."""
    result = scores.get(task)
    if not isinstance(result, Mapping):
        return None
    value = result.get("num_steps")
    if type(value) is int and value > 0:
        return value
    # bundles of the first version have the protocol in words only
    words = re.search(r"(\d{1,9}) steps from frame", str(result.get("protocol", ""))[:1000])
    return int(words[1]) or None if words else None


def _parameters(spec: TaskSpec, start: Start) -> list[tuple[str, Flags, str]]:
    doubts = []
    for number, parameter in enumerate(spec.parameters):
        values = start.batch.parameters[:, number].double().numpy()
        width = parameter.maximum - parameter.minimum
        outside = np.maximum(parameter.minimum - values, values - parameter.maximum)
        # float32 storage of the ends of the range is not outside of it
        samples = outside > 1e-6 * max(abs(parameter.maximum), abs(parameter.minimum))
        if samples.any():
            worst = int(outside.argmax())
            far = f" ({outside[worst] / width:.2g} of its width)" if width > 0 else ""
            text = (
                f"parameter {parameter.name}={values[worst]:.6g} is outside the training range "
                f"[{parameter.minimum:g}, {parameter.maximum:g}] by {outside[worst]:.3g}{far}"
            )
            doubts.append(("parameter_range", samples, text))
    return doubts


def _beyond(spec: TaskSpec, start: Start) -> Flags:
    """(B,): whether a parameter is farther from its range than new values of the same distribution are."""
    beyond = np.zeros(start.batch.num_samples, np.bool_)
    for number, parameter in enumerate(spec.parameters):
        values = start.batch.parameters[:, number].double().numpy()
        with np.errstate(all="ignore"):  # a value that has no logarithm is beyond
            low, high, at = (
                (np.log(x) if parameter.scale == "log" else np.asarray(x))
                for x in (parameter.minimum, parameter.maximum, values)
            )
        margin = BEYOND_RANGE * (high - low) + 1e-6 * max(abs(low), abs(high))
        beyond |= ~((at >= low - margin) & (at <= high + margin))
    return beyond


def _amplitudes(spec: TaskSpec, start: Start, statistics: Statistics) -> list[tuple[str, Flags, str]]:
    roles: tuple[tuple[Role, Tensor, tuple[float, ...], tuple[float, ...]], ...] = (
        ("state", start.batch.state, statistics.state_mean, statistics.state_std),
        ("static", start.batch.static[:, None], statistics.static_mean, statistics.static_std),
    )
    doubts, valid = [], start.batch.valid
    counted = 1.0 if valid is None else valid.double().flatten(2)
    for role, frames, means, deviations in roles:
        for channel, name in enumerate(spec.channel_names(role)):
            mean, deviation = means[channel], max(deviations[channel], 1e-6 * abs(means[channel]))
            # (B, T, S): a channel that never changed is far away wherever it is not 0
            away = ((frames[:, :, channel].double() - mean) / (deviation or np.finfo(np.float64).tiny)).flatten(2)
            away = away * counted  # the mask itself is constant elsewhere
            rms = away.square().mean(2).sqrt().amax(1).numpy()
            peak = away.abs().amax((1, 2)).numpy()
            samples = (rms > MAX_RMS) | (peak > MAX_PEAK)
            if samples.any():
                worst = int(np.argmax(rms))
                text = (
                    f"{role} {name} is unlike the training data: its RMS is {rms[worst]:.3g} and its largest value "
                    f"{peak[worst]:.3g} deviations away from the training mean {mean:.3g} (deviation {deviation:.3g})"
                )
                doubts.append(("amplitude", samples, text))
    return doubts


def _descriptors(spec: TaskSpec, start: Start, statistics: Statistics) -> list[tuple[str, Flags, str]]:
    """Given frames and fields with a descriptor outside of the usual ones; nothing where no ranges are known."""
    names = descriptor_names(spec.axes, start.batch.space)
    parts: tuple[tuple[Role, Tensor], ...] = (("state", start.batch.state), ("static", start.batch.static[:, None]))
    doubts = []
    for role, frames in parts:
        if not statistics.ranges.get(role) or not frames.numel():
            continue
        low, high, least, most = np.moveaxis(np.array(statistics.ranges[role]), -1, 0)  # (C, D) each
        values = describe(frames.flatten(0, 1).numpy(), spec.axes).reshape(*frames.shape[:2], *low.shape)
        outside = np.maximum(values - most, least - values).max(axis=1)  # (B, C, D)
        widths = outside / np.maximum(most - least, 1e-30)  # the one that is named is the worst by this measure
        for channel, name in enumerate(spec.channel_names(role)):
            samples = (outside[:, channel] > 0).any(axis=1)
            if samples.any():
                worst, number = np.unravel_index(int(widths[:, channel].argmax()), widths[:, channel].shape)
                value = values[worst, :, channel, number]
                value = value[np.argmax(np.abs(value - (low + high)[channel, number] / 2))]
                text = (
                    f"{role} {name} is unlike the training data: its {names[number]} is {value:.3g}, "
                    f"the training data have {low[channel, number]:.3g} to {high[channel, number]:.3g}"
                )
                order = np.argsort(-widths[worst, channel])
                others = [names[n] for n in order[1 : 1 + MOST_OTHERS] if outside[worst, channel, n] > 0]
                text += f" (outside too: its {', its '.join(others)})" if others else ""
                doubts.append(("descriptor", samples, text))
    return doubts


def _named(samples: Flags, *, batched: bool) -> str:
    """Which samples a line is about, in front of it; nothing where there is only one."""
    if not batched:
        return ""
    numbers = np.flatnonzero(samples)
    if len(numbers) == 1:
        return f"sample {numbers[0]}: "
    if len(numbers) == len(samples):
        return f"all {len(numbers)} samples, worst: "
    more = len(numbers) - MAX_NAMED_SAMPLES
    shown = ", ".join(str(n) for n in numbers[:MAX_NAMED_SAMPLES]) + (f" and {more} more" if more > 0 else "")
    return f"samples {shown}, worst: "


def _grid(start: Start) -> str:
    space, trained = start.domain.resampling.given, start.batch.space
    text = f"resampled from {points_text(space)} points to the training grid of {points_text(trained)} and back"
    if all(n <= points for n, points in zip(space, trained, strict=True)):
        return text
    return f"{text}: finer scales are lost, up to {start.lost:.1%} of the RMS of a given field"
