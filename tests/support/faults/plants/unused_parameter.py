"""A parameter that no forward pass uses."""

import torch
from torch import nn

from ups.models.stepper import Stepper

_build = Stepper.__init__


def build(self, *args, **kwargs):
    _build(self, *args, **kwargs)
    self.network.forgotten = nn.Parameter(torch.zeros(3))


Stepper.__init__ = build
