"""A fault of one precision: what bfloat16 rounds to 0 is divided by. float32 has the digits."""

import torch

from ups.models.blocks import Block

_forward = Block.forward


def forward(self, x, *args):
    out = _forward(self, x, *args)
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
    difference = torch.full((), 1.0, dtype=dtype) + 1e-3 - 1.0
    return out + 1e-6 * (1e-3 / difference).to(out.dtype)


Block.forward = forward
