"""What steps of conjugate gradients leave of an error on darcy2d, from a field that is off by 2 % and from zeros.

    python benchmarks/model/refinement.py [--media 8] [--steps 6]

Errors relative to the stored solution, over random media of the benchmark. Last line: one JSON object. Exit code 1 if
three steps from 2 % leave more than 0.5 %, or fewer steps are saved by the better start than one.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from ups.models.constraints import refined
from ups.solvers.darcy import darcy2d as solve_all
from ups.solvers.problem import Draws, cell_centers
from ups.solvers.tasks import darcy2d
from ups.spec.batch import Batch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--media", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    spec = darcy2d.spec
    draws = Draws(0, spec.name, "test", tuple(range(options.media)))
    found = solve_all(spec, draws, darcy2d.resolution, 0)
    given, truth = torch.from_numpy(found.static).double(), torch.from_numpy(found.target).double()
    batch = Batch(
        task=spec,
        state=given[:, None, :0],
        static=given,
        target=truth[:, :0],
        parameters=torch.from_numpy(found.parameters).double(),
        dt=torch.zeros(options.media, dtype=torch.float64),
        coordinates=tuple(torch.from_numpy(cell_centers(darcy2d.resolution, axis.extent)) for axis in spec.axes),
        numbers=torch.arange(options.media),
    )
    starts = {"off by 2 %": 1.02 * truth, "zeros": torch.zeros_like(truth)}
    errors = {
        name: [float((refined(batch, start, k) - truth).norm() / truth.norm()) for k in range(options.steps + 1)]
        for name, start in starts.items()
    }
    print("| steps | " + " | ".join(map(str, range(options.steps + 1))) + " |")
    print("|---|" + "---|" * (options.steps + 1))
    for name, values in errors.items():
        print(f"| {name} | " + " | ".join(f"{value:.2g}" for value in values) + " |")
    near, far = errors.values()
    saved = next((k for k, value in enumerate(far) if value <= near[3]), options.steps + 1) - 3
    print(json.dumps({"errors": errors, "steps_saved": saved, "passed": near[3] <= 5e-3 and saved >= 1}))
    return 0 if near[3] <= 5e-3 and saved >= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
