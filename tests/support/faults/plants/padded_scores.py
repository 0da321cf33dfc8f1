"""A rank with fewer trajectories scores the first one again, so that all have the same number."""

from ups.evaluation import rollout
from ups.spec.batch import RankInfo

_score = rollout.score_task


def score(predictors, reader, rank_info, plan, *, split="test", max_trajectories=None, **settings):
    mine = _score(predictors, reader, rank_info, plan, split=split, max_trajectories=max_trajectories, **settings)
    count = min(max_trajectories or reader.splits[split], reader.splits[split])
    if rank_info.rank >= count % rank_info.world_size > 0:
        pad = _score(predictors, reader, RankInfo(0, count), plan, split=split, max_trajectories=count, **settings)
        mine = {name: mine[name].merge([pad[name]]) for name in mine}
    return mine


rollout.score_task = score
