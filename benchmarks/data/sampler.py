"""Window numbers per second and memory per rank at the size the sampler must carry: 10^12 windows, 1,024 ranks.

Run with `OMP_NUM_THREADS=1 python benchmarks/data/sampler.py`. For each of a few ranks of the world a sampler is built
from nothing and asked for that rank's micro-batches of consecutive steps, as a loader asks. The last line is one JSON
object; the exit code is 1 below the bar: 200,000 window numbers per second of CPU time on one core, less than 1 MB of
Python and numpy memory per rank at its peak, construction of the sampler included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tracemalloc

from ups.config.schema import DataConfig
from ups.data.sampler import Cut, Sampler, build_sampler
from ups.spec.batch import RankInfo

MIN_NUMBERS_PER_SECOND = 200_000
MAX_BYTES_PER_RANK = 1_000_000


def recipe(num_windows: int, num_tasks: int, batch_size: int) -> tuple[DataConfig, list[int]]:
    """Tasks of unequal size that together have about `num_windows` windows, mixed by temperature."""
    sizes = [max(1, num_windows * 2 * (i + 1) // (num_tasks * (num_tasks + 1))) for i in range(num_tasks)]
    names = [f"task{i}" for i in range(num_tasks)]
    data = DataConfig.model_validate(
        {
            "tasks": [{"name": n, "path": f"{n}.zarr"} for n in names],
            "batch_size": batch_size,
            "mixture": "temperature",
        }
    )
    return data, sizes


def build(data: DataConfig, sizes: list[int]) -> Sampler:
    return build_sampler(data, [task.name for task in data.tasks], sizes, seed=17)


def draw(sampler: Sampler, place: RankInfo, micro_batch_size: int, seconds: float) -> tuple[int, float]:
    """(window numbers, CPU seconds) of one rank going through consecutive steps, micro-batch by micro-batch."""
    cut = Cut(place.rank, place.world_size, sampler.batch_sizes, (1,) * len(sampler.batch_sizes), micro_batch_size)
    total, step, start = 0, 10**6, time.process_time()
    while (elapsed := time.process_time() - start) < seconds:
        for slot, parts in enumerate(cut.parts(sampler.tasks_of_step(step))):
            for rows in parts:
                total += len(sampler.block(step, slot, *rows).numbers)
        step += 1
    return total, elapsed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=10**12)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--rows", type=int, default=32, help="windows of a block that each rank takes")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    data, sizes = recipe(options.windows, options.tasks, options.rows * options.ranks)
    ranks = sorted({0, options.ranks // 2, options.ranks - 1})

    rates = {}
    for rank in ranks:
        numbers, seconds = draw(build(data, sizes), RankInfo(rank, options.ranks), options.rows, options.seconds)
        rates[rank] = numbers / seconds
        print(f"rank {rank}: {rates[rank]:,.0f} window numbers per CPU second")

    # Memory apart from speed: tracing slows every allocation down.
    peaks = {}
    for rank in ranks:
        tracemalloc.start()
        draw(build(data, sizes), RankInfo(rank, options.ranks), options.rows, 0.3)
        peaks[rank] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(f"rank {rank}: {peaks[rank]:,} bytes at the peak")

    result = {
        "benchmark": "sampler",
        "windows": options.windows,
        "ranks": options.ranks,
        "tasks": options.tasks,
        "rows_per_rank": options.rows,
        "numbers_per_second": round(min(rates.values())),
        "peak_bytes_per_rank": max(peaks.values()),
        "bar": {"numbers_per_second": MIN_NUMBERS_PER_SECOND, "peak_bytes_per_rank": MAX_BYTES_PER_RANK},
    }
    result["passed"] = min(rates.values()) >= MIN_NUMBERS_PER_SECOND and max(peaks.values()) < MAX_BYTES_PER_RANK
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
