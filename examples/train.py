"""From nothing to a scored simulator: small data, a short supervised training on two ranks, scores, one rollout."""

from pathlib import Path

import ups

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"

for task in ("advection1d", "darcy2d"):
    print(ups.generate_data(task, trajectories=(32, 8, 8)))

run = ups.train(RECIPE, ranks=2, progress=True)
if run.state != "completed":
    raise SystemExit(run.why())
print(run.metrics()[["loss", "learning_rate"]])
print(ups.evaluate(run, "valid"))

start = ups.open_data("data/advection1d.zarr").trajectory("test", 0).isel(time=0)
print(run.simulator().rollout(start, steps=10, task="advection1d"))
