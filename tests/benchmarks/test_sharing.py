"""How many parameters tasks share."""

from __future__ import annotations

import pytest

from benchmarks.protocol.sharing import count_parameters
from tests.support.small_model import statistics_of
from ups.config.model import MultiscaleConfig
from ups.models.build import build_model
from ups.models.multiscale import MultiscaleNetwork
from ups.solvers.tasks import BENCH_TASKS
from ups.solvers.tasks import TASKS as BENCH


@pytest.mark.parametrize("own", [False, True], ids=["shared kernels", "own kernels"])
def test_nearly_all_parameters_that_a_task_uses_are_shared(own: bool) -> None:
    tasks = tuple(BENCH[name].spec for name in BENCH_TASKS)
    config = MultiscaleConfig(own_kernels=own)
    network = build_model(config, tasks, {t.name: statistics_of(t) for t in tasks}, 1, device="meta").network
    assert isinstance(network, MultiscaleNetwork)
    counts = count_parameters(network, tasks)
    total = sum(p.numel() for p in network.parameters())
    assert all(shared > 0.99 * active for active, shared in counts.values())
    assert sum(active - shared for active, shared in counts.values()) < 0.01 * total
    line, plane = (counts[name][0] for name in ("burgers1d", "ns2d"))
    if own:
        assert line < plane < 0.85 * total
        lonely = count_parameters(network, [t for t in tasks if t.num_spatial_dims == 2 or t.name == "ks1d"])
        assert lonely["ks1d"][1] < 0.6 * lonely["ks1d"][0], "kernels of lines are those of one task then"
    else:
        assert all(0.98 * total < active < total for active, _ in counts.values())
