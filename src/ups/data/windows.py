"""Window numbers: which trajectory and first frame a number means. O(1) memory, whatever the size of the data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ups.errors import DataError
from ups.formats.base import Reader
from ups.spec.batch import Window


@dataclass(frozen=True, slots=True)
class WindowIndex:
    """All windows of `window_frames` consecutive frames of one split.

    number = trajectory * windows_per_trajectory + start_frame; a steady task has one window per trajectory.
    """

    num_trajectories: int
    num_frames: int
    window_frames: int
    steady: bool = False

    def __post_init__(self) -> None:
        if self.num_trajectories < 0:
            raise DataError(f"a split cannot have {self.num_trajectories} trajectories")
        if not self.steady and not 1 <= self.window_frames <= self.num_frames:
            raise DataError(
                f"windows of {self.window_frames} frames do not fit in trajectories of {self.num_frames} frames",
                hint="use fewer context frames and unroll steps, or a smaller time_stride",
            )

    @classmethod
    def of(cls, reader: Reader, split: str, window_frames: int) -> WindowIndex:
        """The windows of one split of a reader."""
        return cls(reader.splits[split], reader.num_frames, window_frames, reader.task.steady)

    @property
    def windows_per_trajectory(self) -> int:
        return 1 if self.steady else self.num_frames - self.window_frames + 1

    @property
    def read_frames(self) -> int:
        """What to ask `Reader.read` for: 0 for a steady task."""
        return 0 if self.steady else self.window_frames

    def __len__(self) -> int:
        return self.num_trajectories * self.windows_per_trajectory

    def locate(self, number: int) -> tuple[int, int]:
        """(trajectory, start frame) of a window number. Raises DataError outside the split."""
        if not 0 <= number < len(self):
            raise DataError(f"window number {number} is not among the {len(self)} windows of the split")
        return divmod(number, self.windows_per_trajectory)

    def number(self, trajectory: int, start_frame: int) -> int:
        """The inverse of `locate`."""
        if not (0 <= trajectory < self.num_trajectories and 0 <= start_frame < self.windows_per_trajectory):
            raise DataError(f"there is no window at trajectory {trajectory}, frame {start_frame}")
        return trajectory * self.windows_per_trajectory + start_frame

    def read(self, reader: Reader, split: str, number: int) -> Window:
        """The window of that number, carrying its number."""
        trajectory, start_frame = self.locate(number)
        return replace(reader.read(split, trajectory, start_frame, self.read_frames), number=number)
