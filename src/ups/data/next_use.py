"""When data that was just read is read again on this host: the sampler is arithmetic, so the answer is, too.

For the cache of objects (`ups.buckets.block_cache`), which keeps what is used soon and lets go what is used late.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ups.data.rank_source import Planned, RankSource


def steps_until_next_use(source: RankSource, planned: Planned) -> npt.NDArray[np.float64]:
    """For each window (n,) of a part: steps until frames of it are read again, be it with other frames around them.

    Ranks of a host are taken to follow each other. A window that the next pass gives to another host counts as not
    read for two passes.
    """
    task, sampler, cut = planned.task, source.sampler, source.cuts[planned.task]
    index, batch_size = source.indexes[task], sampler.batch_sizes[task]
    trajectories, starts = (np.asarray(found, np.int64) for found in index.locate_all(planned.numbers))
    first = planned.numbers - starts  # of the trajectory
    last = first + np.array([index.windows_in(int(t)) for t in trajectories], np.int64) - 1
    reach = max(0, index.read_frames - 1)
    sharing = planned.numbers[:, None] + np.arange(-reach, reach + 1)  # (n, windows that share a frame with it)
    sharing = np.clip(sharing, first[:, None], last[:, None])
    _, begin = sampler.locate(planned.step, planned.slot)
    places = sampler.next_places(task, sharing.ravel(), begin + batch_size - 1)
    ranks = places % batch_size // cut.share
    here = ranks // source.host_ranks == cut.rank // source.host_ranks
    distance = np.where(here, places - begin, 2 * len(index)).reshape(sharing.shape)
    found: npt.NDArray[np.float64] = distance.min(axis=1) / sampler.places_per_step(task)
    return found
