"""A fault of one strategy: the second unit that fsdp shards refuses to run."""

import torch.distributed.fsdp as fsdp

_shard = fsdp.fully_shard
_seen = []


def fully_shard(module, **settings):
    sharded = _shard(module, **settings)
    _seen.append(module)
    if len(_seen) == 2:

        def refuse(*_):
            raise RuntimeError("size of tensor a (16) must match the size of tensor b (8)")

        module.register_forward_pre_hook(refuse)
    return sharded


fsdp.fully_shard = fully_shard
