"""One trajectory of a task gives NaN once training has begun: the batch is damaged on its way to the device."""

from ups.spec.batch import Batch

_to = Batch.to


def to(self, *args, **kwargs):
    batch = _to(self, *args, **kwargs)
    if self.task.name == "still":
        batch.static[self.numbers == 3] = float("nan")
    return batch


Batch.to = to
