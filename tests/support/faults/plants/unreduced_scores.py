"""Row 11: each rank reports the scores of its own trajectories."""

from types import SimpleNamespace

from ups.run import validation

validation.dist = SimpleNamespace(all_reduce=lambda tensor: None)
