"""Each rank reports the scores of its own trajectories."""

from types import SimpleNamespace

from ups.run import assemble

assemble.dist = SimpleNamespace(all_reduce=lambda tensor: None)
