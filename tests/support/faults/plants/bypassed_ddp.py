"""A step calls the stage itself, so gradients are never reduced and each rank trains a model of its own."""

from ups.distributed.strategies import Ddp

_build = Ddp.__init__


def build(self, stage, runtime):
    _build(self, stage, runtime)
    self.module = stage


Ddp.__init__ = build
