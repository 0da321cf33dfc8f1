"""Every rank cuts the share of rank 0 out of a block, as without a distributed sampler."""

from dataclasses import replace

from ups.data.sampler import Cut

_parts = Cut.parts


def parts(self, tasks):
    return _parts(replace(self, rank=0), tasks)


Cut.parts = parts
