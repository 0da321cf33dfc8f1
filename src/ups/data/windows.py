"""Window numbers: which trajectory and first frame a number means. O(1) memory, whatever the size of the data, unless
trajectories differ in length: then 8 bytes for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ups.errors import DataError
from ups.formats.base import Int64, Reader
from ups.spec.batch import Window


@dataclass(frozen=True, slots=True)
class WindowIndex:
    """All windows of `window_frames` consecutive frames of one split.

    number = windows of all trajectories before + start_frame; a steady task has one window per trajectory. One that is
    shorter than a window has none.
    frames: of each trajectory where they differ; num_frames is then that of the longest.
    """

    num_trajectories: int
    num_frames: int
    window_frames: int
    steady: bool = False
    frames: Int64 | None = field(default=None, compare=False)
    _before: Int64 | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_trajectories < 0:
            raise DataError(f"a split cannot have {self.num_trajectories} trajectories")
        if not self.steady and not 1 <= self.window_frames <= self.num_frames:
            raise DataError(
                f"windows of {self.window_frames} frames do not fit in trajectories of {self.num_frames} frames",
                hint="use fewer context frames and unroll steps, or a smaller time_stride",
            )
        if self.frames is not None:
            windows = np.maximum(self.frames - self.window_frames + 1, 0)
            # (trajectories + 1,): the windows of all trajectories before each, and in the end all of them.
            object.__setattr__(self, "_before", np.concatenate([[0], np.cumsum(windows)]).astype(np.int64))

    @classmethod
    def of(cls, reader: Reader, split: str, window_frames: int) -> WindowIndex:
        """The windows of one split of a reader."""
        return cls(reader.splits[split], reader.num_frames, window_frames, reader.task.steady, reader.frames_of(split))

    def windows_in(self, trajectory: int) -> int:
        """Windows of one trajectory."""
        if self._before is not None:
            return int(self._before[trajectory + 1] - self._before[trajectory])
        return self._windows

    @property
    def _windows(self) -> int:
        return 1 if self.steady else self.num_frames - self.window_frames + 1

    @property
    def read_frames(self) -> int:
        """What to ask `Reader.read` for: 0 for a steady task."""
        return 0 if self.steady else self.window_frames

    def __len__(self) -> int:
        return self.num_trajectories * self._windows if self._before is None else int(self._before[-1])

    def locate(self, number: int) -> tuple[int, int]:
        """(trajectory, start frame) of a window number. Raises DataError outside the split."""
        if not 0 <= number < len(self):
            raise DataError(f"window number {number} is not among the {len(self)} windows of the split")
        trajectories, starts = self.locate_all(np.array([number], np.int64))
        return trajectories[0], starts[0]

    def locate_all(self, numbers: Int64) -> tuple[Sequence[int], Sequence[int]]:
        """Trajectories and start frames of window numbers of the split."""
        if self._before is None:
            return (numbers // self._windows).tolist(), (numbers % self._windows).tolist()
        # The last trajectory that begins at or before a number: those without a window begin where the next one does.
        trajectories = np.searchsorted(self._before, numbers, side="right") - 1
        return trajectories.tolist(), (numbers - self._before[trajectories]).tolist()

    def number(self, trajectory: int, start_frame: int) -> int:
        """The inverse of `locate`."""
        if not (0 <= trajectory < self.num_trajectories and 0 <= start_frame < self.windows_in(trajectory)):
            raise DataError(f"there is no window at trajectory {trajectory}, frame {start_frame}")
        before = trajectory * self._windows if self._before is None else int(self._before[trajectory])
        return before + start_frame

    def read(self, reader: Reader, split: str, number: int) -> Window:
        """The window of that number, carrying its number."""
        trajectory, start_frame = self.locate(number)
        return replace(reader.read(split, trajectory, start_frame, self.read_frames), number=number)
