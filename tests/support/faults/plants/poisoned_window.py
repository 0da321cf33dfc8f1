"""One trajectory of a task gives NaN once training has begun: the batch is damaged on its way to the device."""

from ups.spec.batch import Batch

_to = Batch.to


def to(self, *args, **kwargs):
    found = _to(self, *args, **kwargs)
    if self.task.name == "still":
        found.static[self.numbers == 3] = float("nan")
    return found


Batch.to = to
