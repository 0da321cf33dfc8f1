"""Tasks on points: ours, the same network on interpolated fields, and two networks of points, at equal CPU time.

    python benchmarks/model/points.py --data DIR --out DIR [--tasks plate2d,inclusions2d,heat2d] [--cpu-seconds 240]
                                      [--rows interpolation,grid,ours,neighbors,transolver] [--rates 1e-3,3e-3]

DIR holds what `ups data generate plate2d inclusions2d heat2d` makes; the geometries of the test split are new. Rows:
interpolation: inverse distances of the four nearest points, without their offsets; the network is trained and asked
on the grid, and its result interpolated to the points. grid: our weights, else the same. ours: trained at the points.
neighbors: three layers of messages from the eight nearest points, with offsets, and pooling over the domain
(PointNet++-like). transolver: attention between 32 slices (arXiv 2402.02366), four layers. The last two are tried with
each learning rate; validation chooses. Errors are relative to the trajectory, at the points of 64 test trajectories, of
whole rollouts. What is finished is not repeated. Last line: one JSON object. Exit code 1 if ours is not better than
interpolation and neighbors, or above 1.2 times transolver, on two of three tasks.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from in_process import Job, Recipe, run_jobs

GRID_ROWS = {"interpolation": "inverse_distances", "grid": "trained_on_the_grid", "ours": ""}
POINT_ROWS = ("neighbors", "transolver")
TASKS = ("plate2d", "inclusions2d", "heat2d")
NUM_SCORED, BATCH, WIDTH, NEIGHBORS, SLICES, HEADS = 64, 4, 64, 8, 32, 4


def job_of(options: argparse.Namespace, task: str, row: str) -> Job:
    from benchmarks.protocol.recipes import entries

    # The recipe of ups-bench for a steady task, with the data of this one.
    recipe: Recipe = copy.deepcopy(entries(["ups-alone"], ["darcy2d"], ".", options.cpu_seconds)[0].recipe)
    place = options.data.resolve() / task
    recipe["run"] = {"name": f"{row}-{task}", "dir": f"runs/{row}-{task}", "seed": options.seed}
    recipe["data"]["tasks"] = [
        {"name": task, "path": str(place), "description": str(place / "task.yaml"), "batch_size": BATCH}
    ]
    result = options.out / f"{task}-{row}-{options.seed}.json"
    part = GRID_ROWS[row]
    return Job(
        f"{row}, {task}", result, recipe, NUM_SCORED, options.out / "costs", f"{task}-{row}", test=True, part=part
    )


class Samples:
    """Trajectories of one split as padded tensors. features (n, N, F): positions, distance to the nearest boundary
    point, kind of boundary, static fields, parameters. values (n, T, N, C), T = 1 for a steady task."""

    def __init__(self, folder: Path, split: str, kinds: list[int], targets: list[str]) -> None:
        import numpy as np
        import torch
        from scipy.spatial import cKDTree

        from ups.formats.mesh_files import read_mesh_file

        files = sorted((folder / split).glob("*.npz"))[: None if split == "train" else NUM_SCORED]
        meshes = [read_mesh_file(file) for file in files]
        most = max(len(mesh.points) for mesh in meshes)
        features, values, neighbors = [], [], []
        for mesh in meshes:
            count = len(mesh.points)
            assert mesh.boundary is not None
            edge = cKDTree(mesh.points[mesh.boundary > 0]).query(mesh.points)[0]
            columns = [mesh.points, edge[:, None], mesh.boundary[:, None] == np.asarray(kinds)]
            columns += [v[:, None] for n, v in sorted(mesh.fields.items()) if n not in targets]
            columns += [np.full((count, 1), value) for _, value in sorted(mesh.parameters.items())]
            own = np.concatenate(columns, axis=1)
            asked = np.stack([np.atleast_2d(mesh.fields[name]) for name in targets], -1)  # (T, N, C)
            pad = most - count
            features.append(np.pad(own, ((0, pad), (0, 0))))
            values.append(np.pad(asked, ((0, 0), (0, pad), (0, 0))))
            near = cKDTree(mesh.points).query(mesh.points, NEIGHBORS + 1)[1][:, 1:]
            neighbors.append(np.pad(near, ((0, pad), (0, 0))))
        self.features = torch.tensor(np.stack(features), dtype=torch.float32)
        self.values = torch.tensor(np.stack(values), dtype=torch.float32)
        self.neighbors = torch.tensor(np.stack(neighbors))
        counts = torch.tensor([len(mesh.points) for mesh in meshes])
        self.mask = (torch.arange(most) < counts[:, None]).float()[..., None]  # (n, N, 1)


def build(row: str, num_inputs: int, num_outputs: int) -> Any:
    import torch
    from torch import nn

    def mlp(*widths: int) -> Any:
        layers: list[Any] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), nn.GELU()]
        return nn.Sequential(*layers[:-1])

    class Messages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = mlp(2 * WIDTH + 2, WIDTH, WIDTH), mlp(3 * WIDTH, WIDTH, WIDTH)

        def forward(self, x: Any, places: Any, near: Any, mask: Any) -> Any:
            rows = torch.arange(len(x))[:, None, None]
            offsets = 20 * (places[rows, near] - places[:, :, None])
            sent = self.message(
                torch.cat([x[:, :, None].expand(-1, -1, near.shape[2], -1), x[rows, near], offsets], -1)
            )
            pooled = (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
            return x + self.update(torch.cat([x, sent.amax(2), pooled.expand_as(x)], -1))

    class Slices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm_out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.choose, self.value = nn.Linear(WIDTH // HEADS, SLICES), nn.Linear(WIDTH, WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH // HEADS, 3 * WIDTH // HEADS), nn.Linear(WIDTH, WIDTH)
            self.feed = mlp(WIDTH, 2 * WIDTH, WIDTH)
            self.temperature = nn.Parameter(torch.full((HEADS, 1, 1), 0.5))

        def forward(self, x: Any, places: Any, near: Any, mask: Any) -> Any:
            size, count, _ = x.shape
            heads = self.value(self.norm(x)).view(size, count, HEADS, -1).transpose(1, 2)  # (B, H, N, c)
            shares = (self.choose(heads) / self.temperature).softmax(-1) * mask[:, None]  # (B, H, N, G)
            slices = shares.transpose(2, 3) @ heads / (shares.sum(2)[..., None] + 1e-5)
            q, k, v = self.qkv(slices).chunk(3, -1)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + self.out((shares @ mixed).transpose(1, 2).reshape(size, count, WIDTH))
            return x + self.feed(self.norm_out(x))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.lower = mlp(num_inputs, WIDTH, WIDTH), mlp(WIDTH, WIDTH, num_outputs)
            self.layers = nn.ModuleList(
                Messages() if row == "neighbors" else Slices() for _ in range(3 + (row != "neighbors"))
            )

        def forward(self, inputs: Any, places: Any, near: Any, mask: Any) -> Any:
            x = self.lift(inputs)
            for layer in self.layers:
                x = layer(x, places, near, mask)
            return self.lower(x)

    return Network()


def train_points(folder: Path, row: str, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """Errors on valid and test of a network of points, trained for so much CPU time of this process."""
    import numpy as np
    import torch
    import yaml

    from ups.formats.mesh_files import read_mesh_file

    torch.manual_seed(seed)
    said = yaml.safe_load((folder / "task.yaml").read_text())
    steady = said.get("steady", False)
    targets = [field["name"] for field in said["fields"] if field.get("role", "state") != "static"]
    first = sorted((folder / "train").glob("*.npz"))[:20]
    seen = [read_mesh_file(file).boundary for file in first]
    kinds = sorted({int(k) for kinds in seen if kinds is not None for k in np.unique(kinds) if k > 0})
    train, valid, test = (Samples(folder, split, kinds, targets) for split in ("train", "valid", "test"))
    inside = train.mask.expand_as(train.features) > 0
    count = train.mask.sum((0, 1))
    mean = (train.features * train.mask).sum((0, 1)) / count
    deviation = (((train.features - mean) * inside).square().sum((0, 1)) / count).sqrt().clamp_min(1e-6)
    size = train.values.square().sum((0, 1, 2)).div(train.mask.sum() * train.values.shape[1]).sqrt()
    change = train.values.diff(dim=1)
    step_size = size if steady else change.square().sum((0, 1, 2)).div(train.mask.sum() * change.shape[1]).sqrt()
    channels = len(targets)
    network = build(row, train.features.shape[-1] + (0 if steady else channels), channels)

    def step(samples: Samples, rows: Any, state: Any) -> Any:
        given = (samples.features[rows] - mean) / deviation
        inputs = given if steady else torch.cat([given, state / size], -1)
        out = network(inputs, samples.features[rows][..., :2], samples.neighbors[rows], samples.mask[rows])
        return out * step_size + (0 if steady else state)

    def score(samples: Samples) -> float:
        errors = []
        with torch.no_grad():
            for begin in range(0, len(samples.features), 16):
                rows = slice(begin, begin + 16)
                mask, truth = samples.mask[rows][:, None], samples.values[rows]
                points = mask.sum((1, 2, 3)) * channels
                scale = (truth.square().mean(1).sum((1, 2)) / points).sqrt()
                state = truth[:, 0]
                for frame in range(1 if steady else truth.shape[1] - 1):
                    state = step(samples, rows, state)
                    off = (state - truth[:, 0 if steady else frame + 1]) * mask[:, 0]
                    errors.append((off.square().sum((1, 2)) / points).sqrt() / scale)
        return float(torch.cat(errors).mean())

    optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=1e-4)
    started, used = time.process_time(), 0.0
    while used < seconds:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, used / seconds / 0.03 + 0.05) * 0.5 * (1 + math.cos(math.pi * used / seconds))
        rows = torch.randint(len(train.features), (BATCH,))
        frame = 0 if steady else int(torch.randint(train.values.shape[1] - 1, ()))
        truth, mask = train.values[rows], train.mask[rows]
        predicted = step(train, rows, truth[:, frame])
        off = (predicted - truth[:, 0 if steady else frame + 1]) * mask
        whole = truth[:, frame].square().sum((1, 2)).sqrt() + 1e-3 * size.mean()
        loss = (off.square().sum((1, 2)).sqrt() / whole).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        used = time.process_time() - started
    return {"rate": rate, "valid": score(valid), "test": score(test)}


def point_rows(options: argparse.Namespace, task: str, row: str, rates: list[float], seconds: float) -> float:
    """The test error with the learning rate that validation chooses; what is finished is read. seconds: what the
    networks on the grid took, whose budget is steps."""
    import torch

    torch.set_num_threads(1)
    results = []
    for rate in rates:
        file = options.out / f"{task}-{row}-{rate:g}-{options.seed}.json"
        if not file.exists():
            result = train_points(options.data / task, row, rate, seconds, options.seed)
            file.write_text(json.dumps(result | {"cpu_seconds": seconds}))
        results.append(json.loads(file.read_text()))
    return float(min(results, key=lambda result: result["valid"])["test"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rows", default=",".join((*GRID_ROWS, *POINT_ROWS)))
    parser.add_argument("--rates", default="1e-3,3e-3", help="learning rates of the networks of points")
    parser.add_argument("--cpu-seconds", type=float, default=240.0, help="for each training")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    rates, rows = [float(rate) for rate in options.rates.split(",")], options.rows.split(",")
    errors: dict[str, dict[str, float]] = {}
    for task in options.tasks.split(","):
        errors[task], seconds = {}, options.cpu_seconds
        for row in rows:
            if row in GRID_ROWS:
                job = job_of(options, task, row)
                run_jobs([job], 1)
                if (result := job.finished()) is not None:
                    errors[task][row] = result["test_scores"][task]["rollout"]
                    seconds = max(seconds, result["cpu_seconds"])
            else:
                errors[task][row] = point_rows(options, task, row, rates, seconds)
    print("| task | " + " | ".join(rows) + " |\n|" + "---|" * (len(rows) + 1))
    for task, found in errors.items():
        print(f"| {task} | " + " | ".join(f"{found[row]:.4g}" if row in found else "-" for row in rows) + " |")
    limits = {"interpolation": 1.0, "neighbors": 1.0, "transolver": 1.2}
    wins = [
        all(e["ours"] < m * e[row] for row, m in limits.items()) for e in errors.values() if limits.keys() < e.keys()
    ]
    passed = sum(wins) >= 2
    print(json.dumps({"cpu_seconds": options.cpu_seconds, "errors": errors, "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
