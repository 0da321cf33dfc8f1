"""A layer gives NaN: in the second block of the operator, whatever comes in."""

from ups.models.latent_operator import LatentOperator

_init = LatentOperator.__init__


def init(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    block = self.blocks[1]
    forward = block.mlp_out.forward
    block.mlp_out.forward = lambda x: forward(x) * float("nan")


LatentOperator.__init__ = init
